"""Page ``docs/accuracy/training.md`` of published runs: ``python -m tools.league [--table FILE] [--jobs N]``.

The repository does not contain the table. Without it nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas import api
from hespas.fitting.effects import COMPONENTS, level_effects
from hespas.studies.errors import grouped_by
from hespas.studies.league.document import League
from hespas.studies.league.evaluation import CALIBRATIONS, SHARED, fit_rows_of
from hespas.studies.league.summaries import NEAR_BEST, NOISE_FLOOR, RowGroupErrors
from tools.documents import ROOT, csv_text
from tools.published_settings import prepared_table

__all__ = ["league_pages", "main"]

_TABLE = ROOT.parent / "shared" / "data" / "published_e2e" / "published_training.csv"

_INTRODUCTION = """# Training runs

This page shows how well Hespas predicts training steps that others measured and published. Each step time
is predicted from the settings of its run: model, accelerator, layout, batch, number formats, recomputation.
`hespas-validate league --table FILE.csv` does this for every row of a table and compares the prediction
with the measurement ([how to do it for your runs](../how-to/published-runs.md)). `python -m tools.league`
writes this page. The rules of MLPerf apply to publishing its results; names belong to their owners.

## Prediction of a step

A prediction has three steps. First, the [generator](../how-to/generate.md) writes the operations of each
distinct pipeline stage. Second, the estimator times each kernel, and the model of the system's network
times each collective and message by the positions of its ranks. Third, the simulator of `hespas simulate`
runs the step, so that the command gives the same time (tests/agreement compares them). If a step has many
microbatches, the simulator runs steps with few and extrapolates linearly.

Every predicted time is split into components, whose sum is the step time (`parts` in the JSON document).
They are matrix products, attention and other kernels of the rank that finishes last, its communication
while no kernel runs, its waits for the host, and its idle time (`bubble`). The error of a prediction is
attributed to the components of its critical path.

The estimator is [`training`](../reference/estimators.md#training), which extends `composite` by properties of
training steps. Some efficiencies were not measured. They are data with sources, by device family
(`hespas/hardware/training`): 8-bit products on NVIDIA devices, fused attention, products on TPUs, and the
share of the peak that a device sustains at its power limit. These shares are few round numbers, and their
authors saw the rows below when they chose them. The calibration *none* is therefore not blind.

The rows are predicted with the default configuration of every command for training steps
(`hespas/estimators/configuration.py`). You get the same time with `hespas generate llm --row TABLE.csv:N`
and then `hespas simulate --system NAME`. Both use the same estimator with the options that the row states
(`attention=flash1` for llm-foundry, `power_w=500` for a board with that limit), the same host launches, and
the same slowdown of kernels during communication. Both assume that communicators run concurrently at full
speed even if they share links.

## Calibration

[Calibration](../how-to/published-runs.md#calibration) lists the modes. With `none`, intervals are
[those of training steps](index.md#intervals-of-whole-steps). They come from all rows of the published table,
so they hold more often on these rows than on others.

A correction is a set of factors on the components of a step, fitted to the errors of measured rows. The
logarithm of a row's error is the sum of the errors of its components, each weighted by the component's
share of the step. The error of a component is a sum of effects: of the device family, the software stack,
the accelerator in that stack, the number formats, the kind of model and the release. Effects have normal
priors around zero, so few rows change little. Outliers have less weight. No effect belongs to a single row.

A correction may also make predictions worse. Hespas therefore applies only a share of it (none, a quarter,
a half, three quarters or all) for each software stack on an accelerator. It chooses the share with the
greatest reliable gain: the mean gain on held-out rows less 1.645 standard errors (95 % confidence). Without
such a gain there is no correction. With `leave-group-out` the held-out rows are groups among the rows of
the fit, and groups of the same accelerator and stack have more weight; an accelerator without rows gets no
correction. With `one-per-accelerator` the held-out rows are those of other accelerators, each corrected by
every other row of its own accelerator and stack in turn. The choice of one row there does not matter, so one
standard error is subtracted. If the error of the calibration row has another sign than the calibration rows
of other accelerators predict, it may be of this row only. Then an error of up to 9 % corrects nothing, and
larger errors correct nearly all.

With a calibration the ends of the 90 % intervals are quantiles of the residuals of other groups. Residuals
of the same source have more weight the more there are: 20 weigh as much as all others.

Some constants of the method are round figures in the code: the spreads of effects, the weights of sources,
the host times of kernels, and the slowdown of kernels during communication. They come from a source that
the code names, or were chosen with knowledge of the rows below.

Submitters of the same layout measure different times, so no prediction can be without error. `noise_floor`
of the JSON document is the median difference between submitters to MLPerf with the same layout in the same
round. It is null for tables without such submissions.
"""


def league_pages(leagues: Sequence[League]) -> Mapping[str, str]:
    """Return the page of one table with all calibrations, and a CSV of all groups, by file name."""
    first = leagues[0]
    predicted = sum(row.status != "refused" for row in first.rows)
    assumed = sum(row.status == "assumed" for row in first.rows)
    counts = (
        f"{predicted:,} of {len(first.rows):,} rows are predicted, {assumed:,} of them with assumed "
        "settings. Errors are relative to the published time. Measurements of two submitters with the same "
        f"layout differ by {NOISE_FLOOR:.1%} in the median, so no predictor can have a smaller error.\n"
    )
    text = [
        _INTRODUCTION,
        "## Results\n",
        counts,
        _table(("calibration", *_HEADS), _whole(leagues)),
        _SAME_ROWS,
        _table(("calibration", "pairs", "worse", "largest increase"), _worse(leagues)),
        "For comparison, a naive predictor with a constant MFU per accelerator and number format:\n",
        _table(("baseline", "rows", "mean", "median", "P90"), _naive(first)),
    ]
    memory = first.memory
    if memory.n:
        text.append(
            f"For {memory.n:,} rows the peak memory is published too. Its predictions have a mean error of "
            f"{memory.mean_ape:.1%}, a median error of {memory.median_ape:.1%} and a bias of "
            f"{memory.bias:+.1%}. A row is compared with the memory that it publishes, allocated or reserved "
            "by the allocator. The memory model was developed with these rows.\n"
        )
    text += [
        "### By source\n",
        _table(("source", "calibration", *_HEADS), _by(leagues, "source")),
        "[training.csv](training.csv) has the errors by accelerator, precision, scale, status and model.\n",
    ]
    text += [
        "### By release\n",
        _RELEASES,
        _table(("source", "release", "rows", "measured / predicted", "standard error"), _releases(first)),
        "## Ranking of layouts\n",
        _LAYOUTS,
        _table(("calibration", *_ORDERS), _orders(leagues)),
        f"Sets of three and more whose chosen layout is slower than the best by more than {NEAR_BEST:.0%}:\n",
        _table(
            ("calibration", "source", "model", "accelerator", "accelerators", "layouts", "slower by"),
            _lost(leagues),
        ),
        _SPEEDUPS,
        _table(("calibration", "pairs", "right side", "median error", "P90"), _speedups(leagues)),
        _SCALING,
        _table(("calibration", "points", "median error", "P90"), _scaling(leagues)),
        "The same for the runs of Llama-3.1-405B:\n",
        _table(
            ("calibration", "source", "accelerator", "precision", "fitted on", "accelerators", "error"),
            _curves(leagues),
        ),
        "## Sources of errors\n",
        _DOMINANT,
        _table(("source", *_dominants(first)), _dominating(first)),
        "## Composition of steps\n",
        "Components of the predicted step times: mean share of each, without calibration.\n",
        _table(("source", *_names(first)), _parts(first)),
        "## Not predicted\n",
        _table(("rows", "reason"), _refused(first)),
    ]
    return {
        "training.md": "\n".join(text).rstrip() + "\n",
        "training.csv": csv_text(("by", "value", "calibration", *_HEADS), _groups(leagues)),
    }


_HEADS = ("rows", "mean", "median", "P90", "bias", "90 % intervals hold", "mean without calibration")
_SAME_ROWS = """Calibration rows are not counted, so modes differ in their rows. *Mean without calibration*
is the mean error of the same rows without calibration. This table counts the pairs of accelerator and stack
whose mean error is larger with calibration than without:
"""


def _worse(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        if league.calibrate == "none":
            continue
        pairs = grouped_by(
            (row for row in league.rows if row.counts),
            lambda row: (row.row.cells.get("source", ""), row.row.cells["accelerator"]),
        )
        increases = [
            float(np.mean([abs(row.relative_error) - abs(row.uncalibrated_error) for row in rows]))
            for rows in pairs.values()
        ]
        worse = [increase for increase in increases if increase > 0]
        yield league.calibrate, f"{len(pairs)}", f"{len(worse)}", f"{max(worse, default=0.0):.1%}"


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_RELEASES = """A release of a stack may be faster or slower than others. This table has the effect of each
release on the step time, fitted to all rows together with the other effects of
[Calibration](#calibration). It is relative to the mean of the stack, and near 1 for few rows.
"""


def _releases(league: League) -> Iterator[Sequence[str]]:
    table = fit_rows_of([row.row for row in league.rows if not row.row.predicted.refused])
    several = Counter(
        source for source, _ in set(zip(table.keys["source"], table.keys["release"], strict=True))
    )
    for effect in level_effects(table, "release"):
        source, release = effect.keys
        if several[source] > 1:
            yield source, release, f"{effect.n:,}", f"{effect.factor:.3f}", f"{effect.std_error:.1%}"


def _whole(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        if league.whole is not None:
            yield (league.calibrate, *_figures(league.whole))


def _naive(league: League) -> Iterator[Sequence[str]]:
    for each in league.baselines:
        errors = (f"{value:.1%}" for value in (each.mean_ape, each.median_ape, each.p90_ape))
        yield (each.name, f"{each.n:,}", *errors)


def _by(leagues: Sequence[League], by: str) -> Iterator[Sequence[str]]:
    found = [{each.value: each for each in league.groups if each.by == by} for league in leagues]
    for value in sorted({value for groups in found for value in groups}):
        for league, groups in zip(leagues, found, strict=True):
            if value in groups:
                yield (value, league.calibrate, *_figures(groups[value]))


def _groups(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    """Yield the errors of all groups, with the column that they have in common."""
    for by in ("source", "accelerator", "precision", "scale", "status", "model"):
        yield from ((by, *row) for row in _by(leagues, by))


def _figures(each: RowGroupErrors) -> Iterator[str]:
    yield f"{each.n:,}"
    yield from (f"{value:.1%}" for value in (each.mean_ape, each.median_ape, each.p90_ape))
    yield from (f"{each.bias:+.1%}", f"{each.interval_coverage:.1%}", f"{each.uncalibrated_mean_ape:.1%}")


_LAYOUTS = """Predictions are often used to choose a layout. This table shows how often they choose well. A
set has the measured layouts and number formats of one model on one number of accelerators, ranked by the time
per sequence. Rows that differ in software only count as one layout. *Chosen*: the layout with the fastest
prediction. *Best in top two*: the fastest measured layout is among the two fastest predicted ones. *Tau*:
Kendall's rank correlation of predicted and measured times, median of the sets.
"""
_ORDERS = (
    "layouts",
    "sets",
    "chosen is the best",
    f"chosen within {NEAR_BEST:.0%} of the best",
    "best in top two",
    "tau",
)
_SET_SIZES: Mapping[str, tuple[int, float]] = {"2": (2, 2), "3 and more": (3, inf), "4 and more": (4, inf)}


def _orders(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        for name, (fewest, most) in _SET_SIZES.items():
            sets = [each for each in league.layouts if fewest <= each.layouts <= most]
            if sets:
                count, best = _share([each.chosen_excess == 0 for each in sets])
                near_best = _share([each.chosen_excess <= NEAR_BEST for each in sets])[1]
                top = _share([each.best_in_top_two for each in sets])[1]
                tau = f"{np.nanmedian([each.tau for each in sets]):.2f}" if most > 2 else ""
                yield league.calibrate, name, count, best, near_best, top, tau


def _share(right: Sequence[bool]) -> tuple[str, str]:
    return f"{len(right)}", f"{sum(right) / len(right):.0%}" if right else ""


def _lost(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        for each in league.layouts:
            if each.layouts > 2 and each.chosen_excess > NEAR_BEST:
                where = (each.source, each.model, each.accelerator, each.num_accelerators)
                yield (league.calibrate, *where, f"{each.layouts}", f"{each.chosen_excess:.1%}")


_SPEEDUPS = """Speed-ups between two accelerators for the same source, model, number format and sequence
length. A speed-up is the ratio of the best throughputs on similar numbers of accelerators. *Right side*: the
prediction has the same faster accelerator as the measurement.
"""


def _speedups(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        if league.speedups:
            right = _share([each.right_side for each in league.speedups])
            yield (league.calibrate, *right, *_sizes([each.relative_error for each in league.speedups]))


_SCALING = """Prediction of large runs from small ones. One factor is fitted on the run of each model with the
fewest accelerators, and corrects the predictions of its runs with more:
"""


def _scaling(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        if league.scaling:
            errors = [each.relative_error for each in league.scaling]
            yield (league.calibrate, f"{len(errors):,}", *_sizes(errors))


def _sizes(errors: Sequence[float]) -> tuple[str, str]:
    sizes = np.abs(errors)
    return f"{np.median(sizes):.1%}", f"{np.quantile(sizes, 0.9):.1%}"


_DOMINANT = f"""Number of rows by the component of the step that explains most of the error, without
calibration (`{SHARED}`: all components are wrong by the same factor):
"""


def _dominants(league: League) -> list[str]:
    found = {row.dominant for row in league.rows}
    return [name for name in (*COMPONENTS, SHARED) if name in found]


def _dominating(league: League) -> Iterator[Sequence[str]]:
    counts = Counter((row.row.cells.get("source", ""), row.dominant) for row in league.rows if row.dominant)
    for source in sorted({source for source, _ in counts}):
        numbers = (counts[source, name] for name in _dominants(league))
        yield (source, *(f"{number:,}" if number else "" for number in numbers))


def _curves(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        for each in league.scaling:
            if each.model == "Llama-3.1-405B":
                counts = (f"{each.base:,}", f"{each.num_accelerators:,}")
                where = (each.source, each.accelerator, each.precision)
                yield (league.calibrate, *where, *counts, f"{each.relative_error:+.1%}")


def _names(league: League) -> list[str]:
    return list(dict.fromkeys(name for row in league.rows for name in row.parts))


def _parts(league: League) -> Iterator[Sequence[str]]:
    names = _names(league)
    for source in sorted({row.row.cells.get("source", "") for row in league.rows if row.parts}):
        rows = [row for row in league.rows if row.parts and row.row.cells.get("source", "") == source]
        shares = [sum(row.parts.get(name, 0.0) for row in rows) / len(rows) for name in names]
        yield (source, *(f"{share:.0%}" if share >= 0.005 else "" for share in shares))


def _refused(league: League) -> Iterator[Sequence[str]]:
    counts: dict[str, int] = {}
    for row in league.rows:
        if row.status == "refused":
            counts[row.row.predicted.refused] = counts.get(row.row.predicted.refused, 0) + 1
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield (f"{count}", reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page if the table exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=_TABLE, help="path of published_training.csv")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default: 2)")
    options = parser.parse_args(arguments)
    if not options.table.is_file():
        sys.stdout.write(f"skipped: {options.table} does not exist\n")
        return 0
    with TemporaryDirectory() as folder:
        table = prepared_table(options.table, Path(folder))
        leagues = [api.league(table, calibrate=mode, jobs=options.jobs).details for mode in CALIBRATIONS]
    for name, text in league_pages(leagues).items():
        (ROOT / "docs" / "accuracy" / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/accuracy/{name}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
