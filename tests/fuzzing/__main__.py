"""``python -m tests.fuzzing --reader NAME --kind fields --count N --seed S [--keep FOLDER]``.

Each input is made from a sound one and its number; ``--start NUMBER --count 1`` makes one of them again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from tests.fuzzing.mutate import Input
from tests.fuzzing.subjects import SUBJECTS, seeds
from tests.fuzzing.worker import Failure, Job, Outcome, fuzz

_VARYING = re.compile(r"\d[\d.,e+-]*|['\"].*", re.DOTALL)


def is_one_file(seeds: Sequence[Input]) -> bool:
    """Return True where all inputs are one file of the same name."""
    return len({frozenset(seed) for seed in seeds}) == 1 == len(seeds[0])


def packed(files: Input, seeds: Sequence[Input]) -> bytes:
    """Return an input as one file: as it is, or a ZIP file where there are several, or several names."""
    if is_one_file(seeds):
        return next(iter(files.values()))
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its children."""
    return sum(os.times()[:4])


def _run(job: Job, keep: Path | None) -> bool:
    started, before = time.monotonic(), _cpu_s()
    outcome = fuzz(job)
    rate, taken = len(job.numbers) / (time.monotonic() - started), _cpu_s() - before
    answers = ", ".join(f"{kind} {number:,}" for kind, number in outcome.answers.most_common())
    sys.stdout.write(
        f"{job.subject.name} {job.kind}: {len(job.numbers):,} inputs from {len(job.seeds)} seeds, "
        f"{rate:,.0f}/s in {taken:,.0f} s of CPU time; {answers}; {len(outcome.failures)} failures\n"
    )
    _tell(job, outcome)
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        for number in sorted({failure.number for failure in outcome.failures if failure.number >= 0}):
            (keep / _kept_name(job, number)).write_bytes(packed(job.input(number), job.seeds))
    sys.stdout.flush()
    return not outcome.failures


def _kept_name(job: Job, number: int) -> str:
    return f"{job.subject.name}-{number}"


def _tell(job: Job, outcome: Outcome) -> None:
    """Failures by cause: the most frequent first, each with an input and how to make it again."""
    causes: dict[str, list[Failure]] = defaultdict(list)
    for failure in outcome.failures:
        causes[_VARYING.sub("N", failure.what.replace("\\n", " "))].append(failure)
    for found in sorted(causes.values(), key=len, reverse=True):
        first = found[0]
        sys.stdout.write(f"  {len(found)} x {first.what}\n")
        made = f"--reader {job.subject.name} --kind {job.kind} --seed {job.seed}"
        sys.stdout.write(f"      {made} --start {first.number} --count 1\n")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--reader", choices=[*SUBJECTS, "all"], default="all")
    parser.add_argument("--kind", choices=["fields", "bytes"], default="fields")
    parser.add_argument("--start", type=int, default=0, help="the number of the first input")
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for inputs that are not borne")
    options = parser.parse_args()
    numbers = range(options.start, options.start + options.count)
    good = [
        _run(
            Job(
                subject=SUBJECTS[name],
                seeds=seeds(name),
                numbers=numbers,
                seed=options.seed,
                kind=options.kind,
            ),
            options.keep,
        )
        for name in (SUBJECTS if options.reader == "all" else [options.reader])
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
