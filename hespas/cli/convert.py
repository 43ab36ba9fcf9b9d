"""``hespas-convert``: conversion of a workload from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hespas.api.conversion import Rescaling
from hespas.api.conversion import convert as convert_source
from hespas.api.lowering import MergedOps
from hespas.cli.command import Call, command
from hespas.cli.destinations import list_file
from hespas.cli.entry import run as run_app
from hespas.cli.terminal import emit, is_verbose, print_info, report_diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import OUTPUT, Option
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import bytes_text, count_text, counted, flops_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hespas.api import Conversion

__all__ = ["app", "convert", "main"]

_EXAMPLE = "hespas-convert step.mlir traces/ --hardware H100-SXM"

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_With = Annotated[
    list[Path] | None,
    Option(
        "With --rescale: read the same program at another size of one axis, as evidence; repeatable.",
        flag="with",
        metavar="TRACE",
        panel=OUTPUT,
    ),
]
_Overwrite = Annotated[bool, Option("Replace DST and the file of --log-json if they exist.", panel=OUTPUT)]
_LogJson = Annotated[
    Path | None,
    Option(
        "Write the conversion account as JSON.",
        flag="log-json",
        metavar="FILE|-",
        panel=OUTPUT,
        access="document",
    ),
]
_ListFormats = Annotated[bool, Option("List supported formats and exit.")]
_AsJson = Annotated[
    bool, Option("With --list-formats: write JSON to stdout, or to the FILE that follows.", flag="json")
]


@app.command(
    epilog="Exit codes: 0 done, 2 wrong usage, 3 malformed input, 4 understood but unsupported, 70 our bug."
)
@command(convert_source, progress="converting", has_version=True)
def convert(
    call: Call,
    *,
    with_trace: _With = None,
    overwrite: _Overwrite = False,
    json_file: _LogJson = None,
    list_formats: _ListFormats = False,
    as_json: _AsJson = False,
) -> None:
    """Convert a workload between StableHLO, HLO, op graphs, Chakra traces, profiler traces and drawings.

    hespas-convert step.mlir traces/ --hardware H100-SXM
    """
    from hespas import api

    source, destination, rescale = call["source"], call["destination"], call["rescale"]
    if list_formats:
        _list_formats(source, destination, as_json=as_json, overwrite=overwrite)
        return
    if not source or not destination:
        raise UsageError("SRC and DST are required", hint=_EXAMPLE)
    if with_trace and not rescale:
        raise UsageError("--with requires --rescale", hint="--rescale dp=512")
    changes: dict[str, Any] = {}
    if rescale:
        rescaling = Rescaling(sizes=rescale, mesh=call["mesh"] or "", others=with_trace or ())
        changes = {"rescale": rescaling, "mesh": None}
    done = call.run(api.convert, **changes)
    if json_file:
        api.write_json(done.to_json(), json_file, overwrite=overwrite)
    _print_account(done)
    if done.visible:
        facts = [
            (fact.fact, fact.distinct, fact.models if fact.models >= 0 else None, fact.examples)
            for fact in done.visible
        ]
        print_info(table_from_rows(_VISIBLE, facts).to_text())


_VISIBLE = (
    Column("still visible"),
    Column("distinct", kind="count"),
    Column("models that agree", kind="count"),
    Column("examples"),
)


def _list_formats(source: str | None, destination: str | None, *, as_json: bool, overwrite: bool) -> None:
    """Print the formats, or write them as JSON to SRC, the argument that follows ``--json``."""
    from hespas.converters import usable_formats

    if destination:
        raise UsageError("--list-formats excludes SRC and DST", hint="leave SRC and DST out")
    json_file = list_file(Path(source) if source else None, as_json=as_json, overwrite=overwrite)
    formats = list(usable_formats())
    if json_file:
        rows = [
            {
                "name": entry.name,
                "title": entry.title,
                "suffixes": list(entry.suffixes),
                "read": entry.read is not None,
                "write": entry.write is not None,
                "read_versions": list(entry.read_versions),
                "write_versions": list(entry.write_versions),
                "extra": entry.extra,
                "specification": entry.specification,
            }
            for entry in formats
        ]
        from hespas.api import write_json

        write_json(rows, json_file, overwrite=overwrite)
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
    header = columns("text", "format", "description", "suffixes", "supports")
    emit(table_from_rows(header, lines).to_text())


_ACCOUNT = (Column("figure", " "), *columns("number", "in", "out", write=str))


def _print_account(done: Conversion) -> None:
    """Print diagnostics and the conservation account. They go to standard error, because standard output may
    be DST.
    """
    report_diagnostics(done.diagnostics, done.source)
    print_info(
        f"{done.source} ({done.source_format}) -> "
        f"{done.destination} ({done.target_format}, {bytes_text(done.bytes_written)})"
    )
    if done.events is not None:
        before_events, after_events = done.events.before, done.events.after
        rows = [
            ("device events", count_text(before_events.events), count_text(after_events.events)),
            (
                "device time",
                time_text(before_events.device_time_ns),
                time_text(after_events.device_time_ns),
            ),
            *((name, count_text(one), count_text(other)) for name, one, other in done.events.rows()),
        ]
        print_info(table_from_rows(_ACCOUNT, rows).to_text())
        _print_dropped(done.events.dropped, done.target_format)
    account = done.conservation
    if account is None:
        return
    before, after = account.before, account.after
    print_info(
        f"{counted(account.num_ranks, 'rank')} in {counted(account.rank_classes, 'class')}; "
        "sums over all ranks:"
    )
    rows = [
        ("operations", count_text(before.ops), count_text(after.ops)),
        ("device time", time_text(before.device_time_ns), time_text(after.device_time_ns)),
        ("FLOPs", flops_text(before.flops), flops_text(after.flops)),
        ("useful FLOPs", flops_text(before.useful_flops), flops_text(after.useful_flops)),
        ("bytes moved", bytes_text(before.bytes_moved), bytes_text(after.bytes_moved)),
        ("collectives", count_text(before.collectives), count_text(after.collectives)),
        ("collective payload", bytes_text(before.collective_bytes), bytes_text(after.collective_bytes)),
        ("messages", count_text(before.messages), count_text(after.messages)),
    ]
    if before.unknown_ops or after.unknown_ops:
        counts = (count_text(before.unknown_ops), count_text(after.unknown_ops))
        rows.insert(1, ("... of unknown cost, not in the sums", *counts))
    print_info(table_from_rows(_ACCOUNT, rows).to_text())
    _print_dropped(account.dropped, done.target_format)


_DETAIL_COLUMNS = frozenset({"metadata", "attachments"})
"""Columns whose loss is printed with ``--verbose`` only: facts about the job and attached documents."""
_DETAIL_CODES = frozenset({"chakra.rounded-times"})
"""Losses that are printed with ``--verbose`` only, because they are below the precision of measurements."""


_REMOVALS = {
    "pass.fused": "{count} operations fused into their consumers",
    "pass.folded-free": "{count} zero-cost operations removed (views, constants, tuples)",
    "pass.grouped": "{count} operations merged into regions between collectives",
}
"""Code of a pass that removes operations -> its line in the account."""


def _print_dropped(dropped: Iterable[MergedOps], target: str) -> None:
    """Print the operations and columns that a conversion drops, merges or adds, with their reasons."""
    from hespas.converters import load_format

    losses = load_format(target).losses
    for entry in dropped:
        columns = set(losses.get(entry.reason, ("*",)))
        is_detail = entry.reason in _DETAIL_CODES or columns <= _DETAIL_COLUMNS
        if is_detail and not is_verbose():
            continue
        count = count_text(abs(entry.count))
        if entry.count >= 0 and entry.reason in _REMOVALS:
            text = _REMOVALS[entry.reason].format(count=count)
        elif entry.reason.startswith(("pass.", "rescale.ranks")):
            text = f"{count} operations {'removed' if entry.count >= 0 else 'added'}: {entry.message}"
        else:
            text = f"{count} {entry.message}"
        saved = f" (saves {bytes_text(entry.bytes_moved)} of memory traffic)" if entry.bytes_moved else ""
        print_info(f"{text}{saved} [{entry.reason}]")


def main() -> None:
    """Run ``hespas-convert``."""
    run_app(app)
