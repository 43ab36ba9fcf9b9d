"""Capture the ground truth of this machine: ``python -m benchmarks.ground_truth --out DIR`` (README.md)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.ground_truth.cases import Scale
    from benchmarks.ground_truth.records import Record

__all__: list[str] = []

_FAMILIES = (
    *(
        "models",
        "gemm",
        "attention",
        "conv",
        "norm",
        "elementwise",
        "reduce",
        "gather",
        "move",
        "collectives",
    ),
)
_GRAPHS = "--xla_gpu_enable_command_buffer"
_DONE, _FAULTS, _USAGE, _UNFINISHED, _INTERRUPTED = 0, 1, 2, 75, 130


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ground_truth", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where all of it goes")
    parser.add_argument("--backend", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="executions that are timed")
    parser.add_argument("--only", default="", metavar="A,B", help=f"families, of: {', '.join(_FAMILIES)}")
    parser.add_argument(
        "--scale", choices=("tiny", "small", "full"), help="default: full on a GPU, else small"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the sweep in DIR")
    parser.add_argument("--retry-faults", action="store_true", help="with --resume: try bad cases again")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="S", help="begin no case after S seconds"
    )
    parser.add_argument(
        "--case-limit", type=float, default=180.0, metavar="S", help="give a case up after S seconds"
    )
    parser.add_argument("--most-mb", type=float, default=14.0, metavar="MB", help="bound of all packed files")
    # What the process outside tells the one inside: until when, and that a case has ended the one before.
    parser.add_argument("--until", type=float, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    named: list[str] = [name for name in options.only.split(",") if name]
    unknown = [name for name in named if name not in _FAMILIES]
    if unknown:
        parser.error(f"no such family: {', '.join(unknown)}")
    if options.repeats < 1 or options.most_mb <= 0 or options.case_limit <= 0:
        parser.error("--repeats, --most-mb and --case-limit are positive")
    return options


def _say(text: str) -> None:
    print(text, flush=True)


def _outside(options: argparse.Namespace) -> int:
    from benchmarks.ground_truth.supervise import supervise

    until = time() + options.time_limit
    command = [sys.executable, "-m", "benchmarks.ground_truth", *sys.argv[1:], "--until", repr(until)]
    return supervise(command, options.out, _say, case_limit_s=options.case_limit, deadline=until)


def _set_up(backend: str) -> None:
    """What must stand before JAX is imported."""
    if backend == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if _GRAPHS not in flags:
        # Kernels of a CUDA graph do not say which operation they are of.
        os.environ["XLA_FLAGS"] = f"{flags} {_GRAPHS}=".strip()


def _inside(options: argparse.Namespace) -> int:
    _set_up(options.backend)
    from benchmarks.ground_truth.capture import capture
    from benchmarks.ground_truth.machine import machine
    from benchmarks.ground_truth.measure import prepare
    from benchmarks.ground_truth.store import Store
    from benchmarks.ground_truth.sweep import cases_of

    prepare()
    is_gpu = options.backend == "gpu"
    scale: Scale = options.scale or ("full" if is_gpu else "small")
    families = [name for name in _FAMILIES if not options.only or name in options.only.split(",")]
    store = Store(
        options.out,
        machine(options.backend),
        repeats=options.repeats,
        command=f"python -m benchmarks.ground_truth --backend {options.backend} --scale {scale}",
        most_bytes=int(options.most_mb * 1e6),
    )
    store.open(resume=options.resume or options.again)
    cases = cases_of(families, scale, gpu=is_gpu)
    retry = options.retry_faults and not options.again
    left = capture(cases, store, _say, retry=retry, deadline=options.until)
    return _ended(store.records.values(), store.bytes_used(), left)


def _ended(records: Collection[Record], packed_bytes: int, left: int) -> int:
    """Say what there is now; the exit status."""
    bad = [record for record in records if record.fault]
    untimed = [record for record in records if record.note]
    _say(
        f"{len(records) - len(bad)} cases captured, {len(untimed)} of them without device times, "
        f"{packed_bytes / 1e6:.1f} MB; {len(bad)} bad, {left} left"
    )
    for record in bad:
        _say(f"bad: {record.name}: {record.fault}")
    if left:
        _say("the time is up: --resume goes on")
        return _UNFINISHED
    return _FAULTS if bad else _DONE


def _main() -> int:
    options = _options()
    if options.until is None:
        try:
            return _outside(options)
        except KeyboardInterrupt:
            return _INTERRUPTED
    from hespas.graph.errors import HespasError

    try:
        return _inside(options)
    except KeyboardInterrupt:
        _say("interrupted: --resume goes on")
        return _INTERRUPTED
    except HespasError as error:
        print(error, file=sys.stderr)
        return _USAGE


if __name__ == "__main__":
    sys.exit(_main())
