"""Program that kills a writer at random moments and checks the files: ``python -m tests.faults.kills``.

Each time a child process writes a set of rank files, over an earlier set or into nothing, and is killed with
SIGKILL somewhere on the way. The destination must then be absent, the earlier set, or the new one, whole; and
the next write must leave nothing behind beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn
from zlib import crc32

from hespas import api
from hespas.converters import WriteOptions, load_format
from hespas.graph import Diagnostics, Workload

__all__ = ["Outcome", "kill_writers", "main"]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "binary" / "llama_fsdp_tp_local_N8.mlirbc"


@dataclass(slots=True)
class Outcome:
    """Counts of the states of the destination; ``broken`` lists the invalid ones."""

    absent: int = 0
    old: int = 0
    whole: int = 0
    broken: list[str] | None = None

    def __post_init__(self) -> None:
        """Start with nothing broken."""
        self.broken = []


def kill_writers(folder: Path, *, kills: int, num_bytes: float, seed: int = 0) -> Outcome:
    """Kill ``kills`` writers of about ``num_bytes`` in ``folder`` and judge what each has left."""
    source = api.read(PROGRAM)
    if not isinstance(source, Workload):
        raise TypeError("the fixture is a program")
    small, other = _prepared(source, "H100-SXM"), _prepared(source, "A100-SXM-40GB")
    per_rank = api.write(small, folder / "probe", format="chakra") / 8
    ranks = max(8, round(num_bytes / per_rank / 8) * 8)
    new = Workload.spmd(small.classes[0], ranks)
    old = Workload.spmd(other.classes[0], ranks)
    expected = {
        "old": _written(old, folder / "old-set"),
        "new": _written(new, folder / "new-set"),
    }
    span_s = max(_span_s(new, folder / "timing") for _ in range(3))
    rng, outcome = random.Random(seed), Outcome()
    for number in range(kills):
        target = folder / "work" / "set"
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        overwrites = number % 2 == 1
        if overwrites:
            shutil.copytree(folder / "old-set", target)
            _add_files_of_a_user(target)
        _kill_one(new, target, rng.uniform(0, span_s * 1.3))
        _judge(target, expected, outcome, number, overwrites=overwrites)
        _clean_up(small, target, outcome, number)
    return outcome


def _prepared(source: Workload, hardware: str) -> Workload:
    """The step with the times of a device, as a trace holds it."""
    ready = api.Lowering(
        granularity="op",
        on_unknown="warn",
        hardware=hardware,
        estimator="roofline",
        target=load_format("chakra"),
    )
    return ready.run(source, range(source.num_ranks), Diagnostics())[0]


def _written(workload: Workload, path: Path) -> dict[str, tuple[int, int]]:
    """Write a set; its file names with size and checksum."""
    api.write(workload, path, format="chakra", options=WriteOptions(name="t", directory=True))
    return _contents(path)


_NOTES = b"a user's own"
_USERS = {name: (len(_NOTES), crc32(_NOTES)) for name in ("notes.txt", "link.txt")}


def _add_files_of_a_user(path: Path) -> None:
    """A file and a link, which stay whatever is written beside them."""
    (path / "notes.txt").write_bytes(_NOTES)
    (path / "link.txt").symlink_to("notes.txt")


def _contents(path: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_size, crc32(file.read_bytes())) for file in path.iterdir()}


def _span_s(workload: Workload, path: Path) -> float:
    """Return the time of a writer that is not killed [s]."""
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _write_and_leave(workload, path)
    os.waitpid(pid, 0)
    span_s = time.monotonic() - started
    shutil.rmtree(path)
    return span_s


def _kill_one(workload: Workload, target: Path, after_s: float) -> None:
    pid = os.fork()
    if pid == 0:
        _write_and_leave(workload, target)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _write_and_leave(workload: Workload, target: Path) -> NoReturn:
    options = WriteOptions(name="t", directory=True)
    try:
        api.write(workload, target, format="chakra", overwrite=True, options=options)
    finally:
        os._exit(0)


def _judge(
    target: Path,
    expected: dict[str, dict[str, tuple[int, int]]],
    outcome: Outcome,
    number: int,
    *,
    overwrites: bool,
) -> None:
    found = _contents(target) if target.exists() else None
    kept = _USERS if overwrites else {}
    if found is None and not overwrites:
        outcome.absent += 1
    elif found == expected["new"] | kept:
        outcome.whole += 1
    elif found == expected["old"] | kept and overwrites:
        outcome.old += 1
    elif outcome.broken is not None:
        outcome.broken.append(f"kill {number}: {'none' if found is None else len(found)} files")


def _clean_up(small: Workload, target: Path, outcome: Outcome, number: int) -> None:
    """The next write to the same place removes what the killed one has left."""
    shutil.rmtree(target, ignore_errors=True)
    api.write(small, target, format="chakra")
    left = [entry.name for entry in target.parent.iterdir() if entry != target]
    if left and outcome.broken is not None:
        outcome.broken.append(f"kill {number}: left behind {left}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--bytes", type=float, default=500e6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.folder) as folder:
        done = kill_writers(Path(folder), kills=options.kills, num_bytes=options.bytes, seed=options.seed)
    sys.stdout.write(
        f"{options.kills} kills of writers of {options.bytes:,.0f} bytes: destination absent {done.absent}, "
        f"old {done.old}, new and whole {done.whole}, broken {len(done.broken or [])}\n"
    )
    for line in done.broken or []:
        sys.stdout.write(f"  {line}\n")
    return 1 if done.broken else 0


if __name__ == "__main__":
    sys.exit(main())
