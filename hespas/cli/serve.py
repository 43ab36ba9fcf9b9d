"""``hespas serve``: what requests to a server of a language model see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hespas.api.preparation import DEFAULT_ESTIMATOR
from hespas.cli import options
from hespas.cli.session import (
    check_reports,
    command_line,
    emit,
    hardware_files,
    progress_bar,
    say_diagnostics,
)
from hespas.cli.text import count_text, counted, table_text, time_text
from hespas.graph.diagnostics import Diagnostics

if TYPE_CHECKING:
    from hespas.api import ServingResult

__all__ = ["serve"]

_LAYOUT, _SCHEDULER, _HOST = "Layout and number formats", "Scheduler and cache", "Host"


def _number(what: str, panel: str, *, least: float = 0, metavar: str = "N") -> Any:
    return typer.Option(min=least, metavar=metavar, help=what, rich_help_panel=panel)


_Requests = Annotated[
    str,
    typer.Option(
        metavar="LOG.csv|LOG.jsonl|PROCESS",
        help="A log with arrival_s, prompt_tokens and output_tokens, or a process: poisson:rate=4, "
        "bursts:rate=4,burst=8, closed:concurrency=16; each with requests=, prompt=, output=, ratio=, seed=.",
    ),
]
_Stack = Annotated[
    Literal["vllm", "sglang", "trtllm"],
    typer.Option(help="Whose scheduler and all-reduce.", rich_help_panel=_SCHEDULER),
]
_Dp = Annotated[int, _number("Replicas of attention, which take turns.", _LAYOUT, least=1)]
_Tp = Annotated[int, _number("Ranks that share each layer.", _LAYOUT, least=1)]
_Ep = Annotated[int, _number("Ranks that experts are spread over.", _LAYOUT, least=1)]
_Precision = Annotated[
    str,
    typer.Option(metavar="NAME", help="bf16, fp16, fp8, mxfp8, nvfp4, int8.", rich_help_panel=_LAYOUT),
]
_Experts = Annotated[
    str,
    typer.Option(metavar="TYPE", help="Element type of experts, where another.", rich_help_panel=_LAYOUT),
]
_Cache = Annotated[
    str, typer.Option(metavar="TYPE", help="Element type of keys and values.", rich_help_panel=_LAYOUT)
]
_Tokens = Annotated[int, _number("Most tokens of a step (0: the stack's default).", _SCHEDULER)]
_Sequences = Annotated[int, _number("Most sequences under way (0: the stack's default).", _SCHEDULER)]
_Chunked = Annotated[
    bool | None,
    typer.Option(
        "--chunked/--whole-prompts", help="Cut prompts that fill a step, or wait.", rich_help_panel=_SCHEDULER
    ),
]
_MemoryShare = Annotated[
    float,
    typer.Option(
        min=0.01, max=1, metavar="X", help="Part of memory that is filled.", rich_help_panel=_SCHEDULER
    ),
]
_CacheTokens = Annotated[int, _number("Room of a replica's cache (0: what is left of memory).", _SCHEDULER)]
_HostUs = Annotated[float, _number("Each step waits so long for the host.", _HOST, metavar="US")]
_SequenceUs = Annotated[float, _number("And so long for each of its sequences.", _HOST, metavar="US")]
_PromptUs = Annotated[float, _number("And so long for each of its prompts.", _HOST, metavar="US")]
_RequestMs = Annotated[float, _number("A request is under way so long before it waits.", _HOST, metavar="MS")]
_Rows = Annotated[
    bool,
    typer.Option("--rows", help="Put a row for each request into --json.", rich_help_panel=options.OUTPUT),
]
_Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE.csv", help="Write a row for each request.", rich_help_panel=options.OUTPUT),
]


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|FILE.toml", help="A model that ships, or one of your own.")
    ],
    *,
    hardware: Annotated[str, options.hardware_option("A device: see 'hespas hardware list'.")],
    requests: _Requests,
    stack: _Stack = "vllm",
    dp: _Dp = 1,
    tp: _Tp = 1,
    ep: _Ep = 1,
    precision: _Precision = "bf16",
    experts: _Experts = "",
    cache: _Cache = "bf16",
    max_batched_tokens: _Tokens = 0,
    max_sequences: _Sequences = 0,
    chunked: _Chunked = None,
    memory_share: _MemoryShare = 0.9,
    cache_tokens: _CacheTokens = 0,
    host_us: _HostUs = 0.0,
    sequence_us: _SequenceUs = 0.0,
    prompt_us: _PromptUs = 0.0,
    request_ms: _RequestMs = 0.0,
    estimator: options.Estimator = DEFAULT_ESTIMATOR,
    allow_programs: options.AllowPrograms = False,
    out: _Out = None,
    json_file: options.Json = None,
    rows: _Rows = False,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> None:
    """Serve a language model: time to the first token, time between tokens and throughput of requests.

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
            model=model, hardware=hardware, stack=stack, dp=dp, tp=tp, ep=ep, precision=precision,
            experts=experts, cache=cache, max_batched_tokens=max_batched_tokens,
            max_sequences=max_sequences, chunked=chunked, memory_share=memory_share,
            cache_tokens=cache_tokens, host_us=host_us, sequence_us=sequence_us, prompt_us=prompt_us,
            request_ms=request_ms, estimator=estimator,
        )  # fmt: skip
        with progress_bar("serving", progress) as callback:
            done = api.serve(server, requests, with_rows=rows, diagnostics=diagnostics, progress=callback)
        if out:
            api.write_request_rows(done, out, overwrite=overwrite)
        if json_file:
            api.write_json(done.to_json(), json_file, overwrite=overwrite)
        say_diagnostics(diagnostics, model)
        _show(done)


def _show(done: ServingResult) -> None:
    document = done.document()
    emit(done.headline())
    emit(
        f"{counted(document.requests, 'request')} in {time_text(document.makespan_s * 1e9)}, "
        f"{document.requests_per_s:,.2f} a second; {counted(document.steps, 'step')}, "
        f"{count_text(document.steps_with_prompts)} with prompts, {document.mean_batch:,.1f} sequences in "
        f"the mean; cache of {count_text(document.cache_tokens)} tokens, "
        f"{count_text(document.put_back)} put back"
    )
    figures = [
        (each.what, each.mean_ms, each.p50_ms, each.p90_ms, each.p99_ms, each.max_ms)
        for each in document.times
    ]
    lines = [(what, *(f"{value:,.2f}" for value in values)) for what, *values in figures]
    emit(table_text(("ms", "mean", "p50", "p90", "p99", "max"), lines, left=(0,)))
