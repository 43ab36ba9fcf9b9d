"""``hespas``: commands that view, estimate, simulate, analyze, capture, generate and serve workloads."""

from __future__ import annotations

import typer

from hespas.cli import options
from hespas.cli.analyze import analyze
from hespas.cli.capture import capture
from hespas.cli.destinations import list_file
from hespas.cli.estimate import estimate
from hespas.cli.generate import app as generate_app
from hespas.cli.hardware import app as hardware_app
from hespas.cli.serve import serve
from hespas.cli.session import command_line, redirect_commands, renamed_options
from hespas.cli.session import run as run_app
from hespas.cli.simulate import simulate
from hespas.cli.terminal import emit
from hespas.cli.text import flagged, table_text
from hespas.cli.view import view

__all__ = ["app", "common", "estimators", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="View, estimate, simulate, analyze, capture, generate and serve workloads. "
    "See also hespas-convert and hespas-validate.",
)
app.add_typer(hardware_app, name="hardware")
app.add_typer(generate_app, name="generate")
app.command()(estimate)


@app.command()
def estimators(
    json_file: options.ListFile = None,
    *,
    as_json: options.AsJson = False,
    overwrite: options.Overwrite = False,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """List the estimators, their availability on this machine and the packages that they need."""
    with command_line(debug, writes=[json_file]):
        destination = list_file(json_file, as_json=as_json, overwrite=overwrite)
        from hespas.estimators.registry import list_estimators

        rows = list_estimators()
        if destination:
            from hespas import api

            api.write_json(api.estimators_document(rows), destination, overwrite=overwrite)
            return
        lines = [(row.name, "yes" if row.available else "no", row.what, flagged(row.detail)) for row in rows]
        emit(table_text(("estimator", "available", "description", "detail"), lines, left=(0, 1, 2, 3)))
        for row in rows:
            if row.install and not row.available:
                emit(f"{row.name}: {flagged(row.install)}")


app.command()(view)
app.command(cls=renamed_options({"--beside": "--overlay"}))(simulate)
app.command(cls=renamed_options({"--against": "--baseline"}))(analyze)
app.command()(capture)
app.command(
    cls=renamed_options(
        {
            "--stack": "--engine",
            "--experts": "--expert-dtype",
            "--cache": "--kv-cache-dtype",
            "--memory-share": "--gpu-memory-utilization",
            "--max-sequences": "--max-num-seqs",
            "--cache-tokens": "--kv-cache-tokens",
            "--host-us": "--step-overhead-us",
            "--request-ms": "--request-overhead-ms",
            "--rows": "--per-request",
        }
    )
)(serve)
redirect_commands(
    app,
    "hespas",
    {"convert": "hespas-convert"}
    | {name: f"hespas-validate {name}" for name in ("check", "roundtrip", "accuracy", "calibrate", "compare")}
    | {"validate": "hespas-validate"},
)


@app.callback()
def common(
    show_version: options.Version = False,
) -> None:
    """Handle the options in front of the command."""


def main() -> None:
    """Run ``hespas``."""
    run_app(app)
