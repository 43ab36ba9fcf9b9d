"""Errors of predicted peak memory of published runs: ``python -m benchmarks.published_memory``.

Reads ``published_training.csv`` in the folder ``--data``. Prints each configuration with a published peak,
the mean and the largest error of each source, and the published runs that exceed their device by the
prediction. The predictions are not fitted to these rows. Exits with 1 if a source has a mean error above 3 %
or an error above 10 %, or if a run does not fit. Peaks without a stated unit are read as GiB and printed, but
have no bound.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hespas.generators.llm.layout import Layout, broken_rules
from hespas.generators.llm.memory import StageMemory, memory_of
from hespas.generators.llm.published import PublishedRun, rows_of, run_of
from hespas.generators.llm.settings import Training
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UnsupportedError
from hespas.hardware import device_names, load_device
from hespas.simulator.memory import capacity_of, fits_memory
from tools.published_settings import with_settings

__all__ = ["Run", "fullest", "main", "runs"]

_DATA = Path(__file__).parents[1].parent / "shared" / "data" / "published_e2e"
_GIB = 2**30
_MEAN, _MOST = 0.03, 0.10
_UNIT_NOT_STATED = "unit not stated"


class Run(NamedTuple):
    """A published run: its row, numbered from 0, and its settings. ``gap`` is the reason for absent
    settings.
    """

    number: int
    row: Mapping[str, str]
    settings: PublishedRun | None = None
    gap: str = ""


def runs(data: Path) -> Iterator[Run]:
    """Yield every run of the table."""
    for number, row in enumerate(map(with_settings, rows_of(data / "published_training.csv"))):
        yield _run(number, row)


def _run(number: int, row: Mapping[str, str]) -> Run:
    absent = [name for name in ("micro_batch", "grad_accum", "dp", "tp", "pp", "cp") if not row[name]]
    if absent or "recompute" in row["missing"]:
        return Run(number, row, gap=f"not published: {row['missing'] or ', '.join(absent)}")
    try:
        found = run_of(row, f"row {number}", Diagnostics())
    except UnsupportedError:
        return Run(number, row, gap="the model has no configuration")
    broken = [each.rule for each in broken_rules(found.model, found.layout, found.training)]
    if broken:
        return Run(number, row, gap=f"breaks the rule {broken[0]}")
    return Run(number, row, found)


def fullest(run: Run) -> StageMemory:
    """Return the memory of the pipeline stage with the largest peak."""
    assert run.settings is not None
    found = run.settings
    return max(memory_of(found.model, found.layout, found.training), key=lambda each: each.peak_bytes)


def _published_gib(run: Run) -> float:
    """Return the published peak [GiB]; NaN if there is none."""
    other_unit = run.row["peak_memory_other"]
    return float(
        run.row["peak_memory_gib"] or (other_unit.split()[0] if _UNIT_NOT_STATED in other_unit else "nan")
    )


def _predicted(run: Run, memory: StageMemory) -> float:
    """Return the predicted peak [GiB] as the source counts it: torchtitan prints the reserved memory."""
    counted = memory.reserved_bytes if run.row["source"] == "torchtitan" else memory.peak_bytes
    return counted / _GIB


def _compare(found: Sequence[Run], detailed: bool) -> bool:
    errors: dict[str, list[float]] = defaultdict(list)
    seen: set[tuple[object, ...]] = set()
    print(f"{'row':>4} {'model':24} {'layout':34} {'GiB':>7} {'predicted':>9} {'error':>7}  moment, stage")
    for run in found:
        measured = _published_gib(run)
        if math.isnan(measured) or run.settings is None:
            continue
        memory = fullest(run)
        predicted = _predicted(run, memory)
        error = predicted / measured - 1
        stated = _UNIT_NOT_STATED not in run.row["peak_memory_other"]
        errors[run.row["source"] if stated else f"{run.row['source']} ({_UNIT_NOT_STATED})"].append(error)
        if run.row["peak_memory_other"].endswith("GiB reserved"):
            reserved = float(run.row["peak_memory_other"].split()[0])
            errors[f"{run.row['source']}, reserved"].append(memory.reserved_bytes / _GIB / reserved - 1)
        model, layout, training = run.settings.model, run.settings.layout, run.settings.training
        degrees = _degrees(layout, training)
        key = (model.name, degrees, training.precision.name, measured)
        if key in seen:
            continue
        seen.add(key)
        print(
            f"{run.number:4} {model.name:24} {degrees:34} {measured:7.2f} {predicted:9.2f} "
            f"{error:+7.1%}  {memory.moment}, {memory.stage}"
        )
        if detailed:
            parts = {**memory.parts, **(memory.pooled or {})}
            print("      " + ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items()))
    good = True
    for source, several in errors.items():
        mean = sum(map(abs, several)) / len(several)
        most = max(map(abs, several))
        good &= _UNIT_NOT_STATED in source or (mean <= _MEAN and most <= _MOST)
        print(f"{source}: {len(several)} rows, mean error {mean:.1%}, largest {most:.1%}")
    return good


def _degrees(layout: Layout, training: Training) -> str:
    names = ("dp", "tp", "pp", "vp", "cp", "ep")
    degrees = [f"{name}{getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    return " ".join([*degrees, f"seq{training.seq}"])


def _fits(found: Sequence[Run]) -> bool:
    known = set(device_names())
    gaps: dict[str, int] = defaultdict(int)
    checked, wrong = 0, 0
    for run in found:
        if run.row["accelerator"] not in known:
            gaps[f"device {run.row['accelerator']} is not in the catalogue"] += 1
        elif run.settings is None:
            gaps[f"{run.row['source']}: {run.gap}"] += 1
        else:
            checked += 1
            memory = fullest(run)
            device = load_device(run.row["accelerator"])
            capacity = capacity_of(device, run.settings.facts(device))
            if fits_memory(memory.device_bytes, capacity) is False:
                wrong += 1
                print(
                    f"does not fit: row {run.number} {run.row['source']} {run.row['model']} "
                    f"{run.row['accelerator']} {_degrees(run.settings.layout, run.settings.training)}: "
                    f"{memory.device_bytes / 1e9:.1f} of {capacity / 1e9:.1f} GB"
                )
    print(f"{checked} runs checked, {wrong} do not fit")
    for gap, count in sorted(gaps.items()):
        print(f"  not checked: {count} x {gap}")
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables. Return 1 if a bound is missed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=_DATA, help="folder of the published tables (default: %(default)s)"
    )
    parser.add_argument("--parts", action="store_true", help="print the parts of the memory of each row")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        print(f"skipped: folder {options.data} not found; pass --data")
        return 0
    found = list(runs(options.data))
    accurate = _compare(found, options.parts)
    return 0 if _fits(found) and accurate else 1


if __name__ == "__main__":
    sys.exit(main())
