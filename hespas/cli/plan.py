"""``hespas plan``: the best layouts of a training step, with a proof."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Annotated

from hespas.api.documents import is_stream, write_table
from hespas.api.planning import plan as plan_layouts
from hespas.cli.command import Call, command
from hespas.cli.destinations import check_suffix
from hespas.cli.terminal import emit, percent, report_diagnostics
from hespas.graph.errors import CheckFailedError
from hespas.graph.hints import OUTPUT, Option
from hespas.report.tables import Column, column_of, table_from_rows
from hespas.report.texts import bytes_text, energy_text, time_text

__all__ = ["plan"]

_Out = Annotated[
    Path | None,
    Option(
        "Write one row per simulated layout.",
        metavar="FILE.csv|FILE.parquet|-",
        panel=OUTPUT,
        access="document",
    ),
]


@command(plan_layouts, progress="planning", without=("max_input_bytes",), has_page=True)
def plan(call: Call, *, out: _Out = None) -> None:
    """Find the fastest, cheapest or most frugal layout of a training step, with a proof.

    hespas plan llama-3-8b --devices 64 --hardware H100-SXM --system dgx-h100 --global-batch 128

    hespas plan llama-3-70b --devices 256 --hardware H100-SXM,B200-SXM --objective price --prices prices.toml
    """
    if out and not is_stream(out):
        check_suffix(out, (".csv", ".parquet"), "layouts.csv")
    done = call.run(plan_layouts)
    call.write_json(done.to_json())
    call.write_html(done)
    if out:
        write_table(done.table(), out, overwrite=call.overwrite)
    report_diagnostics(call.diagnostics, done.model)
    best = done.best
    if best is None:
        price_hint = "raise `max_price`, " if done.proof.beyond_price else ""
        memory_hint = "add devices, search more values of `tp`, `pp` or `recompute`, or offload the optimizer"
        raise CheckFailedError(
            done.headline(),
            hint=price_hint + (memory_hint if done.proof.beyond_memory else "or compare other devices"),
        )
    emit(done.headline())
    emit(
        f"90 % interval: {time_text(best.step_low_ns)} to {time_text(best.step_high_ns)}; "
        f"MFU {percent(best.mfu)}, {best.tokens_per_s:,.0f} tokens/s, "
        f"{bytes_text(best.device_memory_bytes)} per device"
    )
    if best.basis:
        emit(f"basis: {best.basis}")
    emit(done.proof_text())
    for source in done.sources:
        emit(source)
    shown = done.rows[: call["top"]]
    clusters = len({(row.hardware, row.devices, row.link_bandwidth) for row in shown}) > 1
    priced = any(not isnan(row.price_per_million_tokens) for row in shown)
    header = [
        *([Column("cluster")] if clusters else []),
        Column("layout"),
        column_of("step_ns"),
        Column("mfu", "MFU", write=percent),
        column_of("device_memory_bytes"),
        column_of("exposed_comm_ns"),
        column_of("bubble_ns"),
        *(
            [Column("price", done.currency + " per M tokens", "number", write="{:,.4g}".format)]
            if priced
            else []
        ),
        Column("energy_j", "energy", "number", write=energy_text),
        Column("loses_by", "loses by"),
    ]
    rows = [
        (
            *([f"{row.devices} {row.hardware} x{row.link_bandwidth:g}"] if clusters else []),
            done.layout_text(row),
            row.step_ns,
            row.mfu,
            row.device_memory_bytes,
            row.exposed_comm_ns,
            row.bubble_ns,
            *([row.price_per_million_tokens] if priced else []),
            row.energy_j,
            done.reason(row),
        )
        for row in shown
    ]
    emit(table_from_rows(header, rows).to_text())
