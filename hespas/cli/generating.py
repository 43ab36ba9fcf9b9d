"""Common part of the ``hespas generate`` commands: their output options, and how a command is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hespas.cli import options
from hespas.cli.destinations import check_reports
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics
from hespas.cli.text import step_lines
from hespas.generators.spec import Generator
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.report.tables import table_text
from hespas.report.texts import bytes_text, count_text, flops_text

__all__ = ["GivenOptions", "generator_command"]

_System = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Also simulate the step on this system.",
        autocompletion=options.system_names,
        rich_help_panel=options.DEVICE,
    ),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print nodes, bytes, FLOPs and memory; write nothing.")
]
_Hardware = Annotated[
    str, options.hardware_option("Also simulate the step on this device, and compare its memory.")
]

_WRITE_OPTIONS = ("to", "only_classes", "shard", "resume", "cluster")
"""Parameters that have an effect on written files only."""


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """Options that the user wrote: ``spellings`` by parameter name."""

    spellings: dict[str, str]
    diagnostics: Diagnostics

    def warn_no_effect(self, name: str, reason: str) -> None:
        """Warn, if an option is given, that it does not change the step."""
        if name in self.spellings:
            self.diagnostics.warning("generate.no-effect", self.spellings[name], f"has no effect: {reason}")


@dataclass(frozen=True, slots=True)
class _OutputOptions:
    """Options of every command: the destination of a generated workload, and its simulation."""

    out: Path | None
    to: str
    dry_run: bool
    hardware: str
    system: str
    jobs: int
    only_classes: bool
    shard: str
    resume: bool
    cluster: str
    json_file: Path | None
    overwrite: bool
    progress: bool | None
    debug: bool

    def generate(self, generator: Generator, diagnostics: Diagnostics) -> None:
        """Generate, simulate and write the workload, then print its figures."""
        from hespas import api

        if (self.out is None) == (not self.dry_run):
            raise UsageError("either --out DST or --dry-run is required", hint="give one of them")
        target_format = options.workload_format(self.out, self.to)
        check_reports(
            {"--json": self.json_file}, {"--out": [self.out] if self.out else []}, overwrite=self.overwrite
        )
        parts = options.parts_of(self.shard, self.cluster, only_classes=self.only_classes, resume=self.resume)
        with progress_bar("writing", self.progress) as callback:
            done = api.generate(
                generator,
                self.out,
                format=target_format,
                overwrite=self.overwrite,
                options=parts.options(jobs=self.jobs, progress=callback),
                measure=self.dry_run,
                hardware=self.hardware or None,
                system=self.system or None,
                diagnostics=diagnostics,
            )
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
        report_diagnostics(diagnostics, generator.name)
        account = done.account
        written = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
        emit(f"{done.headline()}{written}")
        if done.step is not None:
            emit(step_lines(done.step, done.step.where))
        fits = {True: "fits", False: "does not fit", None: "cannot tell whether it fits"}[done.fits]
        capacity = f"{bytes_text(done.capacity_bytes) or 'unknown'}: {fits}" if done.hardware else ""
        rows = [
            ("maximum nodes per rank", count_text(done.nodes_per_rank_max)),
            ("traces of all ranks", bytes_text(done.et_bytes) if not done.written else ""),
            ("parameters", count_text(account.parameters)),
            ("model FLOPs per step", flops_text(account.model_flops_per_step)),
            ("hardware FLOPs per step", flops_text(account.hardware_flops_per_step)),
            ("collective payload per rank", bytes_text(done.collective_bytes_per_rank)),
            ("peak memory per rank", bytes_text(account.peak_memory_bytes)),
            (f"memory of {done.hardware}", capacity),
        ]
        emit(table_text(("figure", "value"), [row for row in rows if row[1]], left=(0,)))
        if account.memory:
            shares = [(part.what, bytes_text(part.size_bytes)) for part in account.memory]
            emit(table_text(("memory of the fullest rank", "size"), shares, left=(0,)))


def _output_options(
    out: options.Destination = None,
    to: options.DestinationFormat = "",
    dry_run: _DryRun = False,
    hardware: _Hardware = "",
    system: _System = "",
    jobs: options.Jobs = 2,
    only_classes: options.OnlyClasses = False,
    shard: options.Shard = "",
    resume: options.Resume = False,
    cluster: options.Cluster = "",
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> _OutputOptions:
    """Collect the output options. The signature declares them for every command."""
    return _OutputOptions(
        out, to, dry_run, hardware, system, jobs, only_classes, shard, resume, cluster, json_file, overwrite,
        progress, debug,
    )  # fmt: skip


def _command_context(call: typer.Context, loudness: options.Loudness = None) -> None:
    """Declare the parameters of every command that are not passed on."""


_SettingsFunction = Callable[..., Generator | None]
"""Function from the given options and a command's own parameters to a generator."""


def generator_command(*reads: str) -> Callable[[_SettingsFunction], Callable[..., None]]:
    """Return a decorator that makes a command of a function from settings to a generator.

    The command has the output options too, and writes or prints the generated workload. A function that
    returns None has printed its own result. ``reads`` are the parameters that name files.
    """

    def parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
        return list(inspect.signature(function, eval_str=True).parameters.values())

    def decorated(function: _SettingsFunction) -> Callable[..., None]:
        own = parameters(function)[1:]
        context = parameters(_command_context)
        shared = parameters(_output_options)
        own_names = {parameter.name for parameter in own}
        shared_names = {parameter.name for parameter in shared}

        def command(call: typer.Context, **values: Any) -> None:
            output = _output_options(
                **{name: value for name, value in values.items() if name in shared_names}
            )
            inputs = [str(values[name]) for name in reads]
            spellings: dict[str, str] = {}
            for parameter in call.command.params:
                name = parameter.name or ""
                source = call.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    is_off = call.params.get(name) is False and parameter.secondary_opts
                    spellings[name] = (parameter.secondary_opts if is_off else parameter.opts)[0]
            given = GivenOptions(spellings, Diagnostics())
            with command_line(
                output.debug, given.diagnostics, next(filter(None, inputs), ""),
                documents=[output.json_file], reads=inputs, writes=[output.out],
            ):  # fmt: skip
                unused = [given.spellings[name] for name in _WRITE_OPTIONS if name in given.spellings]
                if output.dry_run and output.out is None and unused:
                    raise UsageError(
                        f"{', '.join(unused)}: not available with --dry-run, which writes nothing",
                        code="dry-run-writes-nothing",
                        hint="leave it out, or replace --dry-run by --out DST",
                    )
                settings: Any = {name: value for name, value in values.items() if name in own_names}
                generator = function(given, **settings)
                if generator is not None:
                    output.generate(generator, given.diagnostics)

        signature = [*context[:1], *own, *shared, *context[1:]]
        vars(command)["__signature__"] = inspect.Signature(
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature]
        )
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorated
