"""``hespas serve``: predicted TTFT, TPOT and throughput of an LLM server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hespas.api.lowering import DEFAULT_ESTIMATOR
from hespas.cli import options
from hespas.cli.destinations import check_reports, hardware_files
from hespas.cli.session import command_line
from hespas.cli.terminal import emit, progress_bar, report_diagnostics
from hespas.graph.diagnostics import Diagnostics
from hespas.report.tables import table_text
from hespas.report.texts import count_text, counted, time_text

__all__ = ["serve"]

_LAYOUT, _SCHEDULER, _HOST = "Layout and number formats", "Scheduler and cache", "Host"


def _number(what: str, panel: str, *, least: float = 0, metavar: str = "N") -> Any:
    return typer.Option(min=least, metavar=metavar, help=what, rich_help_panel=panel)


_Requests = Annotated[
    str,
    typer.Option(
        metavar="LOG.csv|LOG.jsonl|PROCESS",
        help="Read a log with arrival_s, prompt_tokens and output_tokens, or draw requests from a process: "
        "poisson:rate=4, bursts:rate=4,burst=8, closed:concurrency=16; each with requests=, prompt=, "
        "output=, ratio=, seed=.",
    ),
]
_Engine = Annotated[
    Literal["vllm", "sglang", "trtllm"],
    typer.Option(
        help="Model the scheduler and all-reduce of this serving engine.", rich_help_panel=_SCHEDULER
    ),
]
_Dp = Annotated[int, _number("Set data-parallel attention replicas (round-robin).", _LAYOUT, least=1)]
_Tp = Annotated[int, _number("Set tensor-parallel ranks.", _LAYOUT, least=1)]
_Ep = Annotated[int, _number("Set expert-parallel ranks.", _LAYOUT, least=1)]
_Precision = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Set the precision: bf16, fp16, fp8, mxfp8, nvfp4, int8.",
        rich_help_panel=_LAYOUT,
    ),
]
_ExpertDtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="Set the element type of experts (default: from --precision).",
        rich_help_panel=_LAYOUT,
    ),
]
_KvCacheDtype = Annotated[
    str, typer.Option(metavar="TYPE", help="Set the element type of the KV cache.", rich_help_panel=_LAYOUT)
]
_Tokens = Annotated[
    int,
    _number("Limit tokens per step (vLLM: max-num-batched-tokens; 0: the engine's default).", _SCHEDULER),
]
_Sequences = Annotated[
    int, _number("Limit concurrent sequences (vLLM: max-num-seqs; 0: the engine's default).", _SCHEDULER)
]
_Chunked = Annotated[
    bool | None,
    typer.Option(
        "--chunked/--whole-prompts",
        help="Split a prompt that exceeds a step, or schedule it whole (default: the engine's).",
        rich_help_panel=_SCHEDULER,
    ),
]
_GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1,
        metavar="X",
        help="Set the fraction of device memory to use.",
        rich_help_panel=_SCHEDULER,
    ),
]
_KvCacheTokens = Annotated[
    int, _number("Set the KV-cache size per replica in tokens (0: all free memory).", _SCHEDULER)
]
_StepOverhead = Annotated[float, _number("Set the CPU overhead per step [us].", _HOST, metavar="US")]
_SequenceUs = Annotated[
    float, _number("Set the CPU overhead per sequence of a step [us].", _HOST, metavar="US")
]
_PromptUs = Annotated[float, _number("Set the CPU overhead per prompt of a step [us].", _HOST, metavar="US")]
_RequestOverhead = Annotated[
    float, _number("Set the fixed latency per request before queueing [ms].", _HOST, metavar="MS")
]
_PerRequest = Annotated[
    bool,
    typer.Option("--per-request", help="Add one row per request to --json.", rich_help_panel=options.OUTPUT),
]
_Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE.csv", help="Write one row per request.", rich_help_panel=options.OUTPUT),
]


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL|FILE.toml", help="Built-in model or model file.")],
    *,
    hardware: Annotated[
        str, options.hardware_option("Estimate durations on this device (see 'hespas hardware list').")
    ],
    requests: _Requests,
    engine: _Engine = "vllm",
    dp: _Dp = 1,
    tp: _Tp = 1,
    ep: _Ep = 1,
    precision: _Precision = "bf16",
    expert_dtype: _ExpertDtype = "",
    kv_cache_dtype: _KvCacheDtype = "bf16",
    max_batched_tokens: _Tokens = 0,
    max_num_seqs: _Sequences = 0,
    chunked: _Chunked = None,
    gpu_memory_utilization: _GpuMemoryUtilization = 0.9,
    kv_cache_tokens: _KvCacheTokens = 0,
    step_overhead_us: _StepOverhead = 0.0,
    sequence_us: _SequenceUs = 0.0,
    prompt_us: _PromptUs = 0.0,
    request_overhead_ms: _RequestOverhead = 0.0,
    estimator: options.Estimator = DEFAULT_ESTIMATOR,
    allow_programs: options.AllowPrograms = False,
    out: _Out = None,
    json_file: options.Json = None,
    per_request: _PerRequest = False,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Predict the TTFT, TPOT and throughput of an LLM server.

    hespas serve llama-3-70b --hardware H100-SXM --tp 4 --requests poisson:rate=4,prompt=1024,output=256
    """
    from hespas.api.request_log import log_of

    diagnostics, log = Diagnostics(), log_of(requests)
    reads = [] if log is None else [log]
    with command_line(debug, diagnostics, model, documents=[out, json_file], reads=[*reads, hardware]):
        check_reports(
            {"--out": out, "--json": json_file},
            {"--requests": reads, "--hardware": hardware_files(hardware)},
            overwrite=overwrite,
        )
        from hespas import api

        server = api.Server(
            model=model, hardware=hardware, engine=engine, dp=dp, tp=tp, ep=ep, precision=precision,
            expert_dtype=expert_dtype, kv_cache_dtype=kv_cache_dtype, max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs, chunked=chunked, gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_tokens=kv_cache_tokens, step_overhead_us=step_overhead_us, sequence_us=sequence_us,
            prompt_us=prompt_us, request_overhead_ms=request_overhead_ms, estimator=estimator,
        )  # fmt: skip
        with progress_bar("serving", progress) as callback:
            done = api.serve(
                server, requests, per_request=per_request, diagnostics=diagnostics, progress=callback
            )
        if out:
            api.write_request_rows(done, out, overwrite=overwrite)
        if json_file:
            api.write_json(done.to_json(), json_file, overwrite=overwrite)
        report_diagnostics(diagnostics, model)
        document = done.document()
        emit(done.headline())
        emit(
            f"{counted(document.requests, 'request')} in {time_text(document.makespan_s * 1e9)}, "
            f"{document.requests_per_s:,.2f} requests/s; {counted(document.steps, 'step')}, "
            f"{count_text(document.steps_with_prompts)} with prefill, {document.mean_batch:,.1f} sequences "
            f"per step on average; KV cache of {count_text(document.cache_tokens)} tokens, "
            f"{counted(document.put_back, 'preemption')}"
        )
        lines = [
            (
                row.what,
                *(f"{value:,.2f}" for value in (row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms)),
            )
            for row in document.times
        ]
        emit(table_text(("ms", "mean", "p50", "p90", "p99", "max"), lines, left=(0,)))
