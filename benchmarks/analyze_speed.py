"""CPU time and memory of ``hespas analyze --report`` on a PyTorch profile of 500 MB, against a typed decode.

``python -m benchmarks.analyze_speed [TRACE] [--megabytes N]`` repeats a trace (default: a fixture) up to the
given size. The copies follow each other in time and have their own steps and ids. Prints CPU seconds (user
and system) and peak memory (10^6 bytes) of whole processes, and both as ratios to the floor. The floor
decodes the bytes and holds all events in memory at once. Exits with 1 if a ratio is above its bound.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kineto_read import FLOOR
from benchmarks.process import Usage, alternate

__all__ = ["main", "repeat_trace"]

_FIXTURE = Path(__file__).parents[1] / "fixtures" / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"
_MEGABYTES = 500
_RUNS = 3
_MOST_CPU, _MOST_MEMORY = 6.0, 0.5
_IDS = ("correlation", "External id", "Ev Idx", "Record function id", "Python id", "Python parent id")
"""Arguments that number or link events; each copy of the trace gets its own range of these numbers."""
_STEP = re.compile(r"(ProfilerStep#)(\d+)")

_Event = dict[str, Any]


def repeat_trace(source: Path, path: Path, megabytes: float) -> int:
    """Write copies of a trace, one after the other in time, up to a size. Return the number of events."""
    data = source.read_bytes()
    document: dict[str, Any] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events: list[_Event] = document.pop("traceEvents")
    timed = [each for each in events if each["ph"] == "X"]
    first = min(float(each["ts"]) for each in timed)
    period = max(float(each["ts"]) + float(each["dur"]) for each in timed) - first + 100
    ids = 1 + max(_numbers(events), default=0)
    numbers = [
        int(found[2]) for found in map(_STEP.match, (str(each.get("name")) for each in timed)) if found
    ]
    steps = 1 + max(numbers) - min(numbers) if numbers else 0
    names = [json.dumps(each) for each in events if each["ph"] == "M"]
    moving = [each for each in events if each["ph"] != "M"]
    copy = 0
    with path.open("w") as stream:
        stream.write(
            json.dumps(document)[:-1] + ', "traceEvents": [\n' + "".join(f"{each},\n" for each in names)
        )
        while not copy or stream.tell() < megabytes * 1e6:
            texts = (json.dumps(_moved(each, copy, period, ids, steps)) for each in moving)
            stream.write((",\n" if copy else "") + ",\n".join(texts))
            copy += 1
        stream.write("\n]}")
    return len(names) + copy * len(moving)


def _numbers(events: list[_Event]) -> Iterator[int]:
    for each in events:
        numbers = (each.get("id"), *(each.get("args", {}).get(name) for name in _IDS))
        yield from (number for number in numbers if isinstance(number, int))


def _moved(event: _Event, copy: int, period_us: float, ids: int, steps: int) -> _Event:
    """Return an event of copy number ``copy``, with shifted time, ids and step number."""
    moved = {**event, "ts": round(float(event["ts"]) + copy * period_us, 3)}
    if isinstance(event.get("id"), int):
        moved["id"] = event["id"] + copy * ids
    if "args" in event:
        counted = {name: event["args"][name] for name in _IDS if isinstance(event["args"].get(name), int)}
        moved["args"] = event["args"] | {name: number + copy * ids for name, number in counted.items()}
    if steps and (found := _STEP.match(str(event.get("name")))):
        moved["name"] = f"{found[1]}{int(found[2]) + copy * steps}"
    return moved


def _line(name: str, usage: Usage) -> str:
    cpu_s = usage.user_s + usage.system_s
    return f"  {name:8} {cpu_s:6.2f} CPU s  {usage.user_s:6.2f} s user  {usage.peak_mb:6.0f} MB peak"


def main() -> int:
    """Measure and print. Return 1 if a ratio is above its bound, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "trace", nargs="?", type=Path, default=_FIXTURE, help="trace to repeat (default: a fixture)"
    )
    parser.add_argument(
        "--megabytes", type=float, default=_MEGABYTES, help="size in MB (default: %(default)s)"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "job.rank0.pt.trace.json"
        events = repeat_trace(given.trace, path, given.megabytes)
        size = path.stat().st_size
        program = str(Path(sys.executable).with_name("hespas"))
        analyze = [program, "analyze", str(path), "--report", f"{scratch}/out"]
        floor_command = [sys.executable, "-c", FLOOR, str(path)]
        ours, floor, _ = alternate([*analyze, "--overwrite", "--quiet"], floor_command, _RUNS)
    print(f"{size / 1e6:.0f} MB, {events:,} events: hespas analyze --report, against a bare typed decode")
    print(_line("analyze", ours))
    print(_line("floor", floor))
    cpu = (ours.user_s + ours.system_s) / (floor.user_s + floor.system_s)
    memory = ours.peak_mb / floor.peak_mb
    print(f"  ratios: CPU {cpu:.2f} (at most {_MOST_CPU:g}), memory {memory:.2f} (at most {_MOST_MEMORY:g})")
    return int(cpu > _MOST_CPU or memory > _MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
