"""CPU time and memory of reading a profiler trace of 654,000 events, against a typed decode of its bytes.

``python -m benchmarks.kineto_read [TRACE]``; the default is a generated trace. Prints CPU seconds (user and
system) and peak memory of whole processes. The floor holds all decoded events in memory at once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.process import Usage, alternate
from benchmarks.pytorch_traces import write_device_trace

__all__ = ["FLOOR", "main"]

_EVENTS = 654_000
_RUNS = 5

_READ = """
import sys
import hespas
hespas.read(sys.argv[1], format="kineto")
"""

FLOOR = """
import sys
import msgspec
class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"")
class Trace(msgspec.Struct):
    traceEvents: list[Event]
with open(sys.argv[1], "rb") as stream:
    msgspec.json.decode(stream.read(), type=Trace)
"""


def _line(name: str, usage: Usage) -> str:
    cpu_s = usage.user_s + usage.system_s
    return f"  {name:8} {cpu_s:6.2f} CPU s  {usage.user_s:6.2f} s user  {usage.peak_mb:6.0f} MB peak"


def main() -> None:
    """Measure and print reading, start-up and the floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="trace to read (default: a generated trace)")
    given: Path | None = parser.parse_args().trace
    with tempfile.TemporaryDirectory() as scratch:
        path, events = given or Path(scratch) / "job.rank0.pt.trace.json", ""
        if given is None:
            events = f", {write_device_trace(path, _EVENTS):,} events"
        size = path.stat().st_size
        python = sys.executable
        command, floor_command = [python, "-c", _READ, str(path)], [python, "-c", FLOOR, str(path)]
        ours, floor, ratio = alternate(command, floor_command, _RUNS)
        start, *_ = alternate([python, "-c", "import hespas, numpy"], [python, "-c", "import msgspec"], _RUNS)
    print(f"{path.name}: {size / 1e6:.0f} MB{events}: read as a profile, against a bare typed decode")
    print(_line("read", ours))
    print(_line("start-up", start) + "  (imports alone, included above)")
    print(_line("floor", floor))
    print(f"  user CPU ratio {ratio:.2f} (median of the pairs)")


if __name__ == "__main__":
    main()
