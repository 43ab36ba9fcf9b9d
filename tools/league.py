"""Page ``docs/league.md`` of published runs: ``python -m tools.league [--table FILE] [--jobs N]``.

The repository does not contain the table. Without it nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas import api
from hespas.fitting.effects import COMPONENTS
from hespas.generators.llm.published import SETTINGS
from hespas.studies.league.document import League
from hespas.studies.league.evaluation import CALIBRATIONS, SHARED
from hespas.studies.league.summaries import NOISE_FLOOR, RowGroupErrors
from tools.documents import ROOT
from tools.published_settings import prepared_table

__all__ = ["league_page", "main"]

_TABLE = ROOT.parent / "shared" / "data" / "published_e2e" / "published_training.csv"

_INTRODUCTION = """# Predictions of published runs

Published step times, each predicted from its settings: model, accelerator, layout, batch, number formats,
recomputation. `hespas-validate league --table FILE.csv` predicts every row of a table and compares it with
the measurement; `python -m tools.league` writes this page. The rules of MLPerf apply to publishing its
results; names belong to their owners.

## Prediction of a step

The generator (docs/generation.md) writes the microbatches of each distinct pipeline stage. The estimator
times each kernel; the network of the system times each collective and message by the positions of its
ranks. The simulator of `hespas simulate` runs the step, so both give the same time (tests/agreement
compares them). For a step with many microbatches it runs steps with few and extrapolates linearly. Every
prediction splits into matrix products, attention, collectives and so on without remainder (`parts` in the
document): kernels of the rank that finishes last, its communication while no kernel runs, its waits for the
host, and its idle time (`bubble`). Errors are attributed to components of the critical path.

The estimator is `training` (docs/user-guide.md) on `composite`. Efficiencies without measurements are data
with sources, by device family (`hespas/hardware/training`): 8-bit products on NVIDIA devices, fused
attention, products on TPUs, and the share of the peak that a device sustains at its power limit. These
shares are few round numbers that were chosen with the rows below in view, so the calibration *none* is not
blind.

The configuration is the default of every command for a training step
(`hespas/estimators/configuration.py`): `hespas generate llm --row TABLE.csv:N`, then `hespas simulate
--system NAME` take the same estimator with the options that the row states (`attention=flash1` for
llm-foundry, `power_w=500` for a board with that limit), the same host launches and the same slowdown of
kernels during communication. Both assume that communicators run concurrently at full speed even if they
share links.

## Calibration

* `none`: no fit. Intervals are the intervals of predicted training steps (docs/accuracy.md). They come from
  all rows of the published table, so their coverage on these rows is higher than on others.
* `one-per-accelerator`: one row of each accelerator and source, chosen by settings alone, corrects others.
* `leave-group-out`: each group (source, model, accelerator) is predicted with all other rows.

The logarithmic error of a row is the sum of the errors of its components, weighted by their shares. Effects
of the family, the software stack, the accelerator in it, the number formats, the kind of model and the
release have normal priors around zero, so few rows change little; outliers have less weight. No effect
belongs to a single row. A share of the correction (none to all, in quarters) is applied to a software stack
on an accelerator: the one with the greatest sure gain, which is the mean gain on held-out rows less 1.645
standard errors (95 % confidence). Without such a gain there is no correction. With `leave-group-out` the
held-out rows are groups among the rows of the fit, weighted towards the accelerator and stack; an
accelerator without rows gets no correction. With `one-per-accelerator` they are the rows of other
accelerators, each corrected by its own one row (a row without assumptions if there is one). 90 % intervals
with a calibration are quantiles of residuals of other groups. Residuals of the same source get more weight
the more there are: 20 weigh as much as all others. `hespas-validate calibrate --hardware NAME --end-to-end
--table FILE.csv --out FILE.json` writes the factors of a device with their standard errors, and the errors
before and on groups left out; factors hold for the estimator that they were fitted with.

Spreads of the effects, weights of sources, host times of kernels and the slowdown of kernels during
communication are round figures in the code, chosen with the rows below in view or from a source that the
code names. `noise_floor` of the document is the median difference between submitters to MLPerf with the
same layout in the same round; tables without such submissions have none (null).

## Your own cluster

A table needs `model`, `accelerator`, `num_accelerators`, `seq_len`, `global_batch` and `step_time_ms`, and
takes `source` (the software stack), `framework`, `release`, `micro_batch`, `grad_accum`, `dp`, `tp`, `pp`,
`vp`, `cp`, `ep`, `etp`, `fsdp`, `sequence_parallel`, `recompute`, `precision`, `precision_class`,
`optimizer`, `train_type`, `gpus_per_node`, `accelerator_variant`, `network`, `step_time_lo_ms`,
`step_time_hi_ms`, `mfu_pct`, `peak_memory_gib` and `rows_with_same_config`. Settings of software and device
have columns of their own (`hespas/generators/llm/published.py`):

SETTINGS
Free text (`notes`, `accelerator_variant`) changes nothing. `python -m tools.published_settings IN.csv
OUT.csv` writes the columns for a table of published runs that has only notes, and `python -m
tools.league` does it first. Settings that a row does not state are assumed, and the row is marked.
`accelerator` is any name of a device that ships (`hespas hardware list`) or the path of a device file
in the folder of the table (`my-device.toml`); groups and factors use the name of the device. `network`
is its system, by name (`dgx-h100-roce`) or file, sized to the row; the default is the usual system of
the device. Models that do not ship are read from `models.csv` in that folder. A cell never opens a file
out of the folder: absolute paths, `..` and links that lead elsewhere are refused. Predictions are
cached, so an interrupted run continues. A row is predicted again if the row, or a file that it or the
estimator names, has changed.
"""


def league_page(leagues: Sequence[League]) -> str:
    """Return the page of one table with all calibrations."""
    first = leagues[0]
    predicted = sum(row.status != "refused" for row in first.rows)
    assumed = sum(row.status == "assumed" for row in first.rows)
    counts = (
        f"{predicted:,} of {len(first.rows):,} rows are predicted, {assumed:,} of them need an assumption. "
        f"Submitters with the same layout differ by {NOISE_FLOOR:.1%} in the median: no predictor can beat "
        "that.\n"
    )
    text = [
        _INTRODUCTION.replace("SETTINGS\n", _table(("column", "values"), iter(SETTINGS.items()))),
        "## Results\n",
        counts,
        _table(
            ("calibration", "rows", "mean", "median", "P90", "bias", "90 % intervals hold"), _whole(leagues)
        ),
        "The baseline is a constant MFU per accelerator and number format:\n",
        _table(("baseline", "rows", "mean", "median", "P90"), _naive(first)),
    ]
    memory = first.memory
    if memory.n:
        text.append(
            f"Peak memory, where it is published ({memory.n:,} rows): mean error {memory.mean_ape:.1%}, "
            f"median {memory.median_ape:.1%}, bias {memory.bias:+.1%}. The memory model was developed with "
            "these rows.\n"
        )
    heads = ("calibration", "rows", "mean", "median", "P90", "bias", "90 % intervals hold")
    for by in ("source", "accelerator", "precision", "scale", "status", "model"):
        text += [f"### By {by}\n", _table((by, *heads), _by(leagues, by))]
    text += [
        "## Ranking of layouts\n",
        _LAYOUTS,
        _table(("calibration", *_ORDERS), _orders(leagues)),
        "Sets whose best layout is not among the two predicted best:\n",
        _table(("calibration", "source", "model", "accelerator", "accelerators", "layouts"), _lost(leagues)),
        _SPEEDUPS,
        _table(("calibration", "pairs", "right side", "median error", "P90"), _speedups(leagues)),
        "Scaling, one factor fitted on the fewest accelerators of each model:\n",
        _table(("calibration", "points", "median error", "P90"), _scaling(leagues)),
        "Scaling of Llama-3.1-405B:\n",
        _table(
            ("calibration", "source", "accelerator", "precision", "fitted on", "accelerators", "error"),
            _curves(leagues),
        ),
        "## Sources of errors\n",
        f"Rows by the dominant component of their error, without calibration (`{SHARED}`: no component):\n",
        _table(("source", *_dominants(first)), _dominating(first)),
        "## Composition of steps\n",
        "Mean shares of the predicted steps, without calibration.\n",
        _table(("source", *_names(first)), _parts(first)),
        "## Not predicted\n",
        _table(("rows", "reason"), _refused(first)),
    ]
    return "\n".join(text).rstrip() + "\n"


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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


def _figures(each: RowGroupErrors) -> Iterator[str]:
    yield f"{each.n:,}"
    yield from (f"{value:.1%}" for value in (each.mean_ape, each.median_ape, each.p90_ape))
    yield from (f"{each.bias:+.1%}", f"{each.interval_coverage:.1%}")


_LAYOUTS = """Layouts and number formats of one model on one number of accelerators, ranked by the time
per sequence. Rows that differ in software only are one layout. For sets of two layouts, the table has the
share in the right order.
"""
_ORDERS = ("sets", "best in top two", "sets of three and more", "best in top two", "median tau",
           "sets of two", "right order")  # fmt: skip


def _orders(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        many = [each for each in league.layouts if each.layouts > 2]
        yield (
            league.calibrate,
            *_share([each.best_in_top_two for each in league.layouts]),
            *_share([each.best_in_top_two for each in many]),
            f"{np.nanmedian([each.tau for each in many]):.2f}" if many else "",
            *_share([each.tau > 0 for each in league.layouts if each.layouts == 2]),
        )


def _share(right: Sequence[bool]) -> tuple[str, str]:
    return f"{len(right)}", f"{sum(right) / len(right):.0%}" if right else ""


def _lost(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        for each in league.layouts:
            if not each.best_in_top_two:
                where = (each.source, each.model, each.accelerator, each.num_accelerators)
                yield (league.calibrate, *where, f"{each.layouts}")


_SPEEDUPS = """Speed-ups between accelerators for the same source, model, number format and sequence
length, by the best throughput of each on similar numbers of accelerators. *Right side*: the prediction has
the same faster accelerator.
"""


def _speedups(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        if league.speedups:
            right = _share([each.right_side for each in league.speedups])
            yield (league.calibrate, *right, *_sizes([each.relative_error for each in league.speedups]))


def _scaling(leagues: Sequence[League]) -> Iterator[Sequence[str]]:
    for league in leagues:
        if league.scaling:
            errors = [each.relative_error for each in league.scaling]
            yield (league.calibrate, f"{len(errors):,}", *_sizes(errors))


def _sizes(errors: Sequence[float]) -> tuple[str, str]:
    sizes = np.abs(errors)
    return f"{np.median(sizes):.1%}", f"{np.quantile(sizes, 0.9):.1%}"


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
    parser.add_argument("--table", type=Path, default=_TABLE, help="published_training.csv")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    if not options.table.is_file():
        sys.stdout.write(f"skipped: {options.table} does not exist\n")
        return 0
    with TemporaryDirectory() as folder:
        table = prepared_table(options.table, Path(folder))
        leagues = [api.league(table, calibrate=mode, jobs=options.jobs).details for mode in CALIBRATIONS]
    path = ROOT / "docs" / "league.md"
    path.write_text(league_page(leagues), encoding="utf-8")
    sys.stdout.write(f"docs/{path.name}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
