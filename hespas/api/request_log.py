"""Requests of a serving simulation: a recorded log, or an arrival process as a short text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite, nan
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from hespas.files.tables import Column, read_typed_table
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.simulator.serving import Requests, arrivals_of_bursts, arrivals_of_poisson, lengths

__all__ = ["PROCESSES", "log_of", "requests_of"]

_MAX_TOKENS, _MAX_SPAN_S = 10**9, 1e9
"""Limits of the tokens of a request, and of the time from the first arrival to the last. Longer spans are
not logs of a server, and a float64 of nanoseconds has then an error of more than a tenth of a microsecond.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArrivalProcess:
    """Settings of an arrival process of requests. If ``ratio`` is below 1, prompt and output lengths are
    random between ``ratio`` x length and length, as in serving benchmarks.
    """

    requests: int = 1000
    prompt: int = 1024
    output: int = 256
    ratio: float = 1.0
    rate: float = 1.0
    burst: int = 8
    concurrency: int = 16
    seed: int = 0


PROCESSES: Mapping[str, tuple[str, ...]] = {
    "poisson": ("rate",),
    "bursts": ("rate", "burst"),
    "closed": ("concurrency",),
}
"""Arrival processes -> their own settings, in addition to the number of requests, their lengths and the
seed.
"""
_SHARED_SETTINGS = ("requests", "prompt", "output", "ratio", "seed")
_MAX_COUNT = 2**53
"""Limit of counts: not every larger whole number is a float64."""


def requests_of(spelling: str | Path) -> Requests:
    """Return the requests of an arrival process (``poisson:rate=4,prompt=1024,output=256``), or of a log
    (the path of a CSV or JSON lines file). Raises ``UsageError`` for unknown settings, ``FormatError`` for
    a broken log.
    """
    log = log_of(spelling)
    if log is not None:
        rows = [row for _, row in read_typed_table(log, _LogRow)]
        arrival = np.array([row.arrival_s for row in rows], np.float64)
        prompt = np.array([row.prompt_tokens for row in rows], np.int64)
        output = np.array([row.output_tokens for row in rows], np.int64)
        order = np.argsort(arrival, kind="stable")
        first, last = arrival[order[0]].item(), arrival[order[-1]].item()
        if not last - first <= _MAX_SPAN_S:
            raise FormatError(
                f"the request arrives {last - first:g} s after the first one, more than {_MAX_SPAN_S:,.0f} s",
                path=str(log), position=f"row {order[-1]}",
                hint=f"write arrivals in seconds, the last at most {_MAX_SPAN_S:,.0f} after the first",
            )  # fmt: skip
        return Requests(arrival_ns=(arrival - first)[order] * 1e9, prompt=prompt[order], output=output[order])
    name, _, settings = str(spelling).partition(":")
    process = _parsed_process(name, settings)
    if process.seed < 0:
        raise UsageError(f"invalid seed {process.seed}: expected 0 or more", hint="`seed=0`")
    generator = np.random.default_rng(process.seed)
    count = process.requests
    prompt = lengths(count, process.prompt, process.ratio, generator)
    output = lengths(count, process.output, process.ratio, generator)
    if name == "closed":
        if process.concurrency < 1:
            raise UsageError(
                f"invalid concurrency {process.concurrency}: expected 1 or more", hint="`concurrency=1`"
            )
        arrival = np.zeros(count)
        return Requests(arrival_ns=arrival, prompt=prompt, output=output, concurrency=process.concurrency)
    arrival = (
        arrivals_of_poisson(count, process.rate, generator)
        if name == "poisson"
        else arrivals_of_bursts(count, process.rate, process.burst)
    )
    if not arrival[-1] <= _MAX_SPAN_S * 1e9:
        raise UsageError(
            f"the last of {count:,} requests at a rate of {process.rate:g} arrives after more "
            f"than {_MAX_SPAN_S:,.0f} s",
            hint="use a larger `rate`, or fewer `requests`",
        )
    return Requests(arrival_ns=arrival, prompt=prompt, output=output)


def log_of(spelling: str | Path) -> Path | None:
    """Return the path of a request log, or None if ``spelling`` is an arrival process. Raises ``UsageError``
    if it has settings of an unknown process.
    """
    name, _, settings = str(spelling).partition(":")
    if name in PROCESSES:
        return None
    path = Path(spelling)
    if "=" in settings and not path.exists():
        raise UsageError(f"unknown arrival process {clipped(name)!r}", hint=f"choose {', '.join(PROCESSES)}")
    return path


def _parsed_process(name: str, settings: str) -> _ArrivalProcess:
    allowed = (*PROCESSES[name], *_SHARED_SETTINGS)
    values: dict[str, int | float] = {}
    defaults = {field.name: field.default for field in fields(_ArrivalProcess)}
    for setting in filter(None, settings.split(",")):
        key, _, text = setting.partition("=")
        if key not in allowed:
            raise UsageError(
                f"arrival process {name!r} has no setting {clipped(key)!r}",
                hint=f"use one of {', '.join(allowed)}",
            )
        if key in values:
            raise UsageError(f"arrival process {name!r}: {key} is given twice", hint="give it once")
        try:
            value = float(text)
        except ValueError:
            value = nan
        whole = isinstance(defaults[key], int)
        if not isfinite(value) or (whole and not (value.is_integer() and abs(value) <= _MAX_COUNT)):
            expected = f"a whole number of at most {_MAX_COUNT:,}" if whole else "a number"
            raise UsageError(f"{name}: {key}={clipped(text)} is not {expected}", hint=f"write {key}=NUMBER")
        values[key] = int(value) if whole else value
    return _ArrivalProcess(**values)  # type: ignore[arg-type] # int for fields of int


class _LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a request log. Each also has the names used by vLLM, by Vidur and in Azure's published
    traces.
    """

    arrival_s: Annotated[
        float,
        Column(
            names=("arrival", "arrived_at", "timestamp", "queued_s", "arrival_time"),
            low=-inf,
            high=inf,
            unit="s",
        ),
    ]
    prompt_tokens: Annotated[
        int,
        Column(
            names=("input_tokens", "prompt", "num_prefill_tokens", "contexttokens", "input_len"),
            low=1,
            high=_MAX_TOKENS,
        ),
    ]
    output_tokens: Annotated[
        int,
        Column(
            names=("output", "num_decode_tokens", "generatedtokens", "completion_tokens"),
            low=1,
            high=_MAX_TOKENS,
        ),
    ]
