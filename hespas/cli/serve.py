"""``hespas serve``: predicted TTFT, TPOT and throughput of an LLM server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hespas.api.serving import serve as serve_requests
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, report_diagnostics
from hespas.graph.hints import OUTPUT, Option
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import count_text, counted, time_text

__all__ = ["serve"]

_Out = Annotated[
    Path | None,
    Option("Write one row per request.", metavar="FILE.csv|FILE.parquet|-", panel=OUTPUT, access="document"),
]


@command(
    serve_requests,
    progress="serving",
    without=("max_input_bytes",),
    has_page=True,
)
def serve(call: Call, *, out: _Out = None) -> None:
    """Predict the TTFT, TPOT and throughput of an LLM server.

    hespas serve llama-3-70b --hardware H100-SXM --tp 4 --requests poisson:rate=4,prompt=1024,output=256
    """
    from hespas import api

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
    emit(
        f"{counted(document.requests, 'request')} in {time_text(document.makespan_s * 1e9)}, "
        f"{document.requests_per_s:,.2f} requests/s; {counted(document.steps, 'step')}, "
        f"{count_text(document.steps_with_prompts)} with prefill, {document.mean_batch:,.1f} sequences "
        f"per step on average; KV cache of {count_text(document.cache_tokens)} tokens, "
        f"{counted(document.put_back, 'preemption')}"
    )
    header = (
        Column("ms"),
        *columns("number", "mean", "p50", "p90", "p99", "max", write="{:,.2f}".format, unknown="nan"),
    )
    lines = [
        (row.what, row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms) for row in document.times
    ]
    emit(table_from_rows(header, lines).to_text())
