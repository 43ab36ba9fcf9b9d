"""``hespas serve``: predicted TTFT, TPOT and throughput of an LLM server, and its best configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np

from hespas.api.documents import is_stream, write_table
from hespas.api.serving import serve as serve_requests
from hespas.api.serving_plan import plan_serving
from hespas.cli.command import Call, command
from hespas.cli.destinations import check_suffix
from hespas.cli.terminal import emit, report_diagnostics
from hespas.graph.errors import CheckFailedError, UsageError
from hespas.graph.hints import OUTPUT, Option
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import count_text, counted, time_text

__all__ = ["serve"]

_Out = Annotated[
    Path | None,
    Option(
        "Write one row per request; with `sla`, per configuration.",
        metavar="FILE.csv|FILE.parquet|-",
        panel=OUTPUT,
        access="document",
    ),
]
_AXES = (
    "hardware", "devices", "dp", "tp", "ep", "max_batched_tokens", "max_num_seqs", "prefill_servers",
    "decode_servers", "prefill_dp", "prefill_tp", "prefill_ep",
)  # fmt: skip
_OF_SEARCH = ("devices", "percentile", "objective", "prices", "top")
_MOST_POINTS = 12
"""Points of the frontier that are printed."""


@command(
    plan_serving,
    serve_requests,
    progress="serving",
    without=("max_input_bytes",),
    has_page=True,
)
def serve(call: Call, *, out: _Out = None) -> None:
    """Predict the TTFT, TPOT and throughput of an LLM server, or find its best configuration.

    hespas serve llama-3-70b --hardware H100-SXM --tp 4 --requests poisson:rate=4,prompt=1024,output=256

    hespas serve llama-3-70b --hardware H100-SXM,B200-SXM --devices 8 --sla ttft=500ms,tpot=30ms
    """
    if out and not is_stream(out):
        check_suffix(out, (".csv", ".parquet"), "servers.csv")
    if call.is_written("sla"):
        _search(call, out)
        return
    from hespas import api

    for name in _OF_SEARCH:
        if call.is_written(name):
            raise UsageError(f"`{name}` requires `sla`", hint="add `sla=ttft=500ms,tpot=30ms`")
    for name in _AXES:
        if isinstance(call[name], tuple | list) and len(call[name]) > 1:
            raise UsageError(f"several values of `{name}` require `sla`", hint="`sla=ttft=500ms,tpot=30ms`")
    if not call.is_written("requests") or not call["requests"]:
        raise UsageError("`requests` is required", hint="`requests=poisson:rate=4,prompt=1024,output=256`")
    call = replace(call, texts={**call.texts, "hardware": call["hardware"][0]})
    done = call.run(api.serve)
    if out:
        api.write_request_rows(done, out, overwrite=call.overwrite)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(call.diagnostics, call["model"])
    document = done.document()
    emit(done.headline())
    if done.basis_text:
        emit(f"basis: {done.basis_text}")
    speculated = ""
    if tokens := done.server.num_speculative_tokens:
        speculated = (
            f"{counted(tokens, 'speculative token')} per sequence and step, "
            f"{document.tokens_per_step:,.2f} tokens generated; "
        )
    emit(
        f"{counted(document.requests, 'request')} in {time_text(document.makespan_s * 1e9)}, "
        f"{document.requests_per_s:,.2f} requests/s; {counted(document.steps, 'step')}, "
        f"{count_text(document.steps_with_prompts)} with prefill, {document.mean_batch:,.1f} sequences "
        f"per step on average; {speculated}KV cache of {count_text(document.cache_tokens)} tokens, "
        f"{counted(document.put_back, 'preemption')}"
    )
    for pool in document.pools or ():
        emit(
            f"{pool.pool}: {counted(pool.servers, 'server')}, {counted(pool.ranks, 'device')}, "
            f"{pool.busy_share:.0%} busy, {counted(pool.steps, 'step')}"
        )
    header = (
        Column("ms"),
        *columns("number", "mean", "p50", "p90", "p99", "max", write="{:,.2f}".format, unknown="nan"),
    )
    lines = [
        (row.what, row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms) for row in document.times
    ]
    emit(table_from_rows(header, lines).to_text())


def _search(call: Call, out: Path | None) -> None:
    """Find the configuration with the highest load within latency limits, and print it with the next ones."""
    if call["per_request"]:
        raise UsageError("`per_request` and `sla` exclude each other", hint="leave one of them out")
    done = call.run(plan_serving)
    call.write_json(done.to_json())
    call.write_html(done)
    if out:
        write_table(done.table(), out, overwrite=call.overwrite)
    report_diagnostics(call.diagnostics, done.model)
    if not done.best.is_within:
        missed_hint = (
            "raise the limit, add devices, search more values of `tp`, or use a narrower `precision`"
        )
        is_short = done.best.is_lower_bound
        raise CheckFailedError(
            done.headline(), hint="state more requests= in `requests`" if is_short else missed_hint
        )
    emit(done.headline())
    if done.best.basis:
        emit(f"basis: {done.best.basis}")
    emit(done.account_text())
    for source in done.sources:
        emit(source)
    drawn = np.unique(np.linspace(0, len(done.frontier) - 1, min(len(done.frontier), _MOST_POINTS)).round())
    points = [done.frontier[int(index)] for index in drawn]
    has_price = done.has_prices()
    for title, rows in (("", done.rows[: call["top"]]), ("Pareto frontier of latency and tokens/s:", points)):
        price = Column("price", f"{done.currency} per M tokens", "number", write="{:,.4g}".format)
        header = [
            Column("cluster"),
            Column("configuration"),
            Column("load"),
            Column("rate", "tokens/s per device", "number", write="{:,.0f}".format),
            *columns("number", "TTFT ms", "TPOT ms", "latency ms", write="{:,.1f}".format),
            *([price] if has_price else []),
            *([] if title else [Column("loses_by", "loses by")]),
        ]
        cells = [
            (
                f"{row.devices:,} x {row.hardware}",
                done.settings_text(row),
                done.load_text(row),
                row.output_tokens_per_s_per_device,
                row.ttft_ms,
                row.tpot_ms,
                row.latency_ms,
                *([row.price_per_million_tokens] if has_price else []),
                *([] if title else [done.reason(row)]),
            )
            for row in rows
        ]
        if title:
            emit(title)
        emit(table_from_rows(header, cells).to_text())
