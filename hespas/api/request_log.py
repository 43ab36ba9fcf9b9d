"""Requests that a command names: a recorded log, or an arrival process in a few words."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path

import msgspec
import numpy as np

from hespas.files.documents import check_column_names
from hespas.files.limits import limits
from hespas.files.streams import read_bytes
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.simulator.serving import Requests, arrivals_of_bursts, arrivals_of_poisson, lengths

__all__ = ["PROCESSES", "log_of", "requests_of"]

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "arrival": ("arrival_s", "arrival", "arrived_at", "timestamp", "queued_s", "arrival_time"),
    "prompt": ("prompt_tokens", "input_tokens", "prompt", "num_prefill_tokens", "contexttokens", "input_len"),
    "output": ("output_tokens", "output", "num_decode_tokens", "generatedtokens", "completion_tokens"),
}
"""Names of columns of a log, the first that is there counts: those of vLLM's and Vidur's and of Azure's
published traces among them. Arrivals are in seconds.
"""
_MOST_TOKENS, _LONGEST_S = 10**9, 1e9
"""Of a request, and from the first arrival to the last: what is longer is no log of a server, and beyond it
a float64 of nanoseconds is off by a tenth of a microsecond.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """What the words of an arrival process set. ``ratio``: lengths are spread evenly over ratio x the stated
    length .. the stated length, as serving benchmarks draw them.
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
"""Arrival processes, and what each reads beside the number of requests, their lengths and the seed."""
_OF_ALL = ("requests", "prompt", "output", "ratio", "seed")
_MOST_STATED = 2**53
"""Of any count: beyond it not every whole number is one of float64."""


def requests_of(spelling: str | Path) -> Requests:
    """The requests that ``poisson:rate=4,prompt=1024,output=256`` or the path of a log (CSV or JSON lines)
    names. Raises ``UsageError`` for words that no process has, ``FormatError`` for a log that cannot be read.
    """
    log = log_of(spelling)
    if log is not None:
        return _read(log)
    name, _, words = str(spelling).partition(":")
    return _drawn(name, _stated(name, words))


def log_of(spelling: str | Path) -> Path | None:
    """The log that is named; None where it is a process."""
    return None if str(spelling).partition(":")[0] in PROCESSES else Path(spelling)


def _stated(name: str, words: str) -> _Process:
    known = (*PROCESSES[name], *_OF_ALL)
    values: dict[str, int | float] = {}
    defaults = {field.name: field.default for field in fields(_Process)}
    for word in filter(None, words.split(",")):
        key, _, text = word.partition("=")
        if key not in known:
            raise UsageError(f"{name} has no {clipped(key)!r}", hint=f"known are {', '.join(known)}")
        if key in values:
            raise UsageError(f"{name}: {key} is stated twice", hint="state it once")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        whole = isinstance(defaults[key], int)
        if not isfinite(value) or (whole and not (value.is_integer() and abs(value) <= _MOST_STATED)):
            what = f"a whole number of at most {_MOST_STATED:,}" if whole else "a number"
            raise UsageError(f"{name}: {key} is {clipped(text)!r}", hint=what)
        values[key] = int(value) if whole else value
    return _Process(**values)  # type: ignore[arg-type] # whole where the field is


def _drawn(name: str, process: _Process) -> Requests:
    if process.seed < 0:
        raise UsageError(f"a seed of {process.seed}", hint="`seed=0` or more")
    generator = np.random.default_rng(process.seed)
    count = process.requests
    prompt = lengths(count, process.prompt, process.ratio, generator)
    output = lengths(count, process.output, process.ratio, generator)
    if name == "closed":
        if process.concurrency < 1:
            raise UsageError(f"concurrency of {process.concurrency}", hint="`concurrency=1` or more")
        arrival = np.zeros(count)
        return Requests(arrival_ns=arrival, prompt=prompt, output=output, concurrency=process.concurrency)
    arrival = (
        arrivals_of_poisson(count, process.rate, generator)
        if name == "poisson"
        else arrivals_of_bursts(count, process.rate, process.burst)
    )
    if not arrival[-1] <= _LONGEST_S * 1e9:
        raise UsageError(
            f"at a rate of {process.rate:g} the last of {count:,} requests comes after {_LONGEST_S:,.0f} s",
            hint="a larger `rate`, or fewer `requests`",
        )
    return Requests(arrival_ns=arrival, prompt=prompt, output=output)


def _read(path: Path) -> Requests:
    """A log in order of arrival, the first at 0."""
    rows = _json_rows(path) if path.suffix in {".jsonl", ".ndjson"} else _csv_rows(path)
    names, columns = _found(rows, path)
    values = [_column(column, name, path) for column, name in zip(columns, names, strict=True)]
    arrival, prompt, output = values
    for name, column in zip(names[1:], values[1:], strict=True):
        is_none = (column < 1) | (column > _MOST_TOKENS) | (column != np.floor(column))
        if is_none.any():
            at = int(np.argmax(is_none))
            raise FormatError(
                f"{column[at]:g} tokens", path=str(path), position=f"request {at}, {name}",
                hint=f"whole numbers from 1 to {_MOST_TOKENS:,}",
            )  # fmt: skip
    order = np.argsort(arrival, kind="stable")
    first, last = arrival[order[0]].item(), arrival[order[-1]].item()
    if not last - first <= _LONGEST_S:
        raise FormatError(
            f"arrives {last - first:g} s after the first", path=str(path),
            position=f"request {order[-1]}, {names[0]}",
            hint=f"arrivals in seconds, the last at most {_LONGEST_S:,.0f} after the first",
        )  # fmt: skip
    arrival = (arrival - first)[order] * 1e9
    return Requests(
        arrival_ns=arrival, prompt=prompt[order].astype(np.int64), output=output[order].astype(np.int64)
    )


def _csv_rows(path: Path) -> list[Mapping[str, object]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    rows: list[Mapping[str, object]] = []
    try:
        check_column_names((name.strip().casefold() for name in reader.fieldnames or ()), path)
        for row in reader:
            if any(row.pop(None, ())):
                raise FormatError(
                    "more cells than the header", path=str(path), position=f"request {len(rows)}",
                    hint="quote cells with commas in them",
                )  # fmt: skip
            rows.append(row)
    except csv.Error as error:
        raise FormatError(
            f"no row of CSV: {error}", path=str(path), position=f"line {reader.line_num + 1}",
            hint="a request a line, cells divided by commas",
        ) from error  # fmt: skip
    return rows


def _text(path: Path) -> str:
    try:
        return read_bytes(path, limits().table_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError("no UTF-8 text", path=str(path), position=f"byte {error.start}") from error


def _json_rows(path: Path) -> list[Mapping[str, object]]:
    rows: list[Mapping[str, object]] = []
    for number, line in enumerate(_text(path).split("\n")):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, object]))
        except (msgspec.DecodeError, RecursionError) as error:
            raise FormatError(
                f"no JSON object: {error}", path=str(path), position=f"line {number + 1}",
                hint="one object a line",
            ) from error  # fmt: skip
    return rows


def _found(
    rows: Sequence[Mapping[str, object]], path: Path
) -> tuple[tuple[str, ...], tuple[list[object], ...]]:
    """Names and values of the columns of arrival, prompt and output."""
    if not rows:
        raise FormatError("no requests", path=str(path), hint="a log has a row for each request")
    present = {name.strip().casefold(): name for name in rows[0]}
    names: list[str] = []
    for what, wanted in _COLUMNS.items():
        name = next((present[each] for each in wanted if each in present), "")
        if not name:
            raise FormatError(
                f"no column of {what}", path=str(path), position="header", hint=f"one of {', '.join(wanted)}"
            )
        names.append(name)
    return tuple(names), tuple([row.get(name) for row in rows] for name in names)


def _column(values: Iterable[object], name: str, path: Path) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    numbers: list[float] = []
    for place, value in enumerate(values):
        try:
            number = float(value) if isinstance(value, str | int | float) else float("nan")
        except (ValueError, OverflowError):
            number = float("nan")
        if not isfinite(number):
            raise FormatError(
                f"{clipped(repr(value))} is no number", path=str(path), position=f"request {place}, {name}",
                hint="arrivals in seconds, lengths in tokens",
            )  # fmt: skip
        numbers.append(number)
    return np.array(numbers, np.float64)
