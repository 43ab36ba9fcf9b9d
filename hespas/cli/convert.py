"""``hespas-convert``: a workload from one format into another."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.cli.session import (
    DebugOption,
    ProgressOption,
    command_line,
    emit,
    progress_bar,
    say,
    say_diagnostics,
    version,
)
from hespas.cli.text import bytes_text, count_text, flops_text, table_text, time_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import Conversion

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Granularity(StrEnum):
    OP = "op"
    FUSED = "fused"
    REGION = "region"


class _Missing(StrEnum):
    ERROR = "error"
    WARN = "warn"
    ZERO = "zero"


@app.command(
    epilog="Exit codes: 0 done, 2 wrong usage, 3 malformed input, 4 understood but unsupported, 70 our bug."
)
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A file, a directory of NAME.{rank}.et files, or -.")
    ] = "",
    destination: Annotated[str, typer.Argument(metavar="DST", help="A file, a directory, or -.")] = "",
    source_format: Annotated[
        str, typer.Option("--from", metavar="FORMAT", help="Read SRC as this format.")
    ] = "",
    target_format: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="Write DST in this format.")
    ] = "",
    hardware: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Give operations the time they take on this device.")
    ] = "",
    estimator: Annotated[str, typer.Option(metavar="NAME", help="Which estimator says so.")] = "roofline",
    ranks: Annotated[str, typer.Option(metavar="N|A-B", help="Write only this rank, or these.")] = "",
    num_devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of ranks where the program does not say.")
    ] = None,
    granularity: Annotated[
        _Granularity | None,
        typer.Option(
            help="One node per operation, per elementwise chain, or per region between collectives."
        ),
    ] = None,
    missing: Annotated[
        _Missing, typer.Option(help="What to do where a time or a trip count is not known.")
    ] = _Missing.WARN,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST where it exists.")] = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Threads for writing rank files.")] = 2,
    progress: Annotated[bool | None, ProgressOption] = None,
    log_json: Annotated[
        Path | None, typer.Option("--log-json", metavar="FILE", help="Write what was done, as JSON.")
    ] = None,
    list_formats: Annotated[bool, typer.Option("--list-formats", help="List the formats and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list-formats: as JSON.")] = False,
    debug: Annotated[bool, DebugOption] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Convert a workload: StableHLO, HLO, op graph or Chakra traces in, op graph or Chakra traces out.

    hespas-convert step.mlir traces/ --hardware H100-SXM
    """
    with command_line(debug):
        if list_formats:
            _list_formats(as_json)
            return
        if not source or not destination:
            raise UsageError(
                "SRC and DST are needed", hint="hespas-convert step.mlir traces/ --hardware H100-SXM"
            )
        from hespas.api import conversion_document, write_json
        from hespas.api import convert as run

        with progress_bar("converting", progress) as callback:
            done = run(
                source,
                destination,
                source_format=source_format or None,
                target_format=target_format or None,
                hardware=hardware or None,
                estimator=estimator,
                ranks=_parse_ranks(ranks),
                num_devices=num_devices,
                granularity=granularity.value if granularity else None,
                missing=missing.value,
                overwrite=overwrite,
                jobs=jobs,
                progress=callback,
            )
        if log_json:
            write_json(conversion_document(done), log_json)
        say_diagnostics(done.diagnostics, source)
        _report(done)


def _parse_ranks(text: str) -> range | None:
    """``5`` is that rank, ``2-7`` are both ends and all between."""
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not first.isascii() or not first.isdigit() or (dash and not (last.isascii() and last.isdigit())):
        raise UsageError(f"--ranks {text!r} is neither a rank nor a range", hint="--ranks 0 or --ranks 0-7")
    low, high = int(first), int(last or first)
    if high < low:
        raise UsageError(f"--ranks {text!r} ends before it starts", hint=f"--ranks {high}-{low}")
    return range(low, high + 1)


def _list_formats(as_json: bool) -> None:
    from hespas.converters import format_names, load_format

    formats = [load_format(name) for name in format_names()]
    if as_json:
        rows = [
            {
                "name": entry.name,
                "title": entry.title,
                "suffixes": list(entry.suffixes),
                "read": entry.read is not None,
                "write": entry.write is not None,
                "extra": entry.extra,
                "specification": entry.specification,
            }
            for entry in formats
        ]
        emit(json.dumps(rows, indent=2))
        return
    lines = [
        (
            entry.name,
            entry.title,
            " ".join(entry.suffixes),
            "/".join(verb for verb, can in (("read", entry.read), ("write", entry.write)) if can),
        )
        for entry in formats
    ]
    emit(table_text(("format", "what", "suffixes", "can"), lines, text_columns=4))


def _report(done: Conversion) -> None:
    """The account of a conversion on standard error: standard output may carry the result."""
    say(
        f"{done.source} ({done.source_format}) -> "
        f"{done.destination} ({done.target_format}, {bytes_text(done.bytes_written)})"
    )
    account = done.conservation
    if account is None:
        return
    before, after = account.before, account.after
    say(
        f"{count_text(account.num_ranks)} ranks in {count_text(account.rank_classes)} classes; "
        "sums over all ranks:"
    )
    rows = [
        ("operations", count_text(before.ops), count_text(after.ops)),
        ("device time", time_text(before.device_time_ns), time_text(after.device_time_ns)),
        ("FLOPs", flops_text(before.flops), flops_text(after.flops)),
        ("FLOPs without zeros", flops_text(before.useful_flops), flops_text(after.useful_flops)),
        ("bytes moved", bytes_text(before.bytes_moved), bytes_text(after.bytes_moved)),
        ("collectives", count_text(before.collectives), count_text(after.collectives)),
        ("collective payload", bytes_text(before.collective_bytes), bytes_text(after.collective_bytes)),
        ("messages", count_text(before.messages), count_text(after.messages)),
    ]
    say(table_text(("", "in", "out"), rows))
    for code, count in account.dropped.items():
        example = next(found.message for found in done.diagnostics if found.code == code)
        say(f"{count:,} {example} [{code}]")


def main() -> None:
    """Entry point."""
    app()
