"""``python -m tests.fuzzing --reader NAME --count N --seed S --keep FOLDER``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzzing.seeds import READERS, seeds_of
from tests.fuzzing.worker import Outcome, fuzz


def _run(name: str, count: int, seed: int, keep: Path | None) -> bool:
    reader, seeds = READERS[name], seeds_of(name)
    started = time.monotonic()
    outcome = fuzz(reader, seeds, range(count), seed)
    rate = count / (time.monotonic() - started)
    answers = ", ".join(f"{kind} {number:,}" for kind, number in outcome.answers.most_common())
    sys.stdout.write(
        f"{name}: {count:,} inputs from {len(seeds)} seeds, {rate:,.0f}/s; {answers}; "
        f"{len(outcome.failures)} failures\n"
    )
    _tell(name, outcome, keep)
    return not outcome.failures


def _tell(name: str, outcome: Outcome, keep: Path | None) -> None:
    for failure in outcome.failures[:20]:
        sys.stdout.write(f"  input {failure.number}: {failure.what}\n")
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        for failure in outcome.failures:
            (keep / f"{name}-{failure.number}").write_bytes(failure.data)
    sys.stdout.flush()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", choices=[*READERS, "all"], default="all")
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for inputs that a reader does not bear")
    options = parser.parse_args()
    names = list(READERS) if options.reader == "all" else [options.reader]
    good = [_run(name, options.count, options.seed, options.keep) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
