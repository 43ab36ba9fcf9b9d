"""Command that captures the ground truth of this machine: ``python -m benchmarks.ground_truth --out DIR``.

See README.md.
"""

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
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument("--backend", choices=("cpu", "gpu"), default="cpu", help="JAX backend (default: cpu)")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timed executions per case (default: 5)"
    )
    parser.add_argument(
        "--only", default="", metavar="A,B", help=f"families (default: all): {', '.join(_FAMILIES)}"
    )
    parser.add_argument(
        "--scale",
        choices=("tiny", "small", "full"),
        help="size of the sweep (default: full on a GPU, else small)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the sweep in DIR")
    parser.add_argument(
        "--retry-faults", action="store_true", help="with --resume: capture failed cases again"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=float("inf"),
        metavar="S",
        help="start no case after S seconds (default: no limit)",
    )
    parser.add_argument(
        "--case-limit",
        type=float,
        default=180.0,
        metavar="S",
        help="kill a case after S seconds (default: 180)",
    )
    parser.add_argument(
        "--most-mb", type=float, default=14.0, metavar="MB", help="limit of all packed files (default: 14)"
    )
    # Options that the supervising process passes: the deadline, and that a case ended the previous process.
    parser.add_argument("--until", type=float, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    named: list[str] = [name for name in options.only.split(",") if name]
    unknown = [name for name in named if name not in _FAMILIES]
    if unknown:
        parser.error(f"unknown family: {', '.join(unknown)}; families: {', '.join(_FAMILIES)}")
    if options.repeats < 1 or options.most_mb <= 0 or options.case_limit <= 0:
        parser.error("--repeats, --most-mb and --case-limit must be positive")
    return options


def _say(text: str) -> None:
    print(text, flush=True)


def _outside(options: argparse.Namespace) -> int:
    from benchmarks.ground_truth.supervise import supervise

    until = time() + options.time_limit
    command = [sys.executable, "-m", "benchmarks.ground_truth", *sys.argv[1:], "--until", repr(until)]
    return supervise(command, options.out, _say, case_limit_s=options.case_limit, deadline=until)


def _set_up(backend: str) -> None:
    """Set the environment variables that JAX reads at import."""
    if backend == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if _GRAPHS not in flags:
        # Kernels of a CUDA graph do not name their operation.
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
    """Print a summary of the sweep. Return the exit status."""
    bad = [record for record in records if record.fault]
    untimed = [record for record in records if record.note]
    _say(
        f"{len(records) - len(bad)} cases captured, {len(untimed)} of them without device times, "
        f"{packed_bytes / 1e6:.1f} MB; {len(bad)} failed, {left} left"
    )
    for record in bad:
        _say(f"failed: {record.name}: {record.fault}")
    if left:
        _say("time limit reached: continue with --resume")
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
        _say("interrupted: continue with --resume")
        return _INTERRUPTED
    except HespasError as error:
        print(error, file=sys.stderr)
        return _USAGE


if __name__ == "__main__":
    sys.exit(_main())
