"""Comparison of model FLOPs of published runs with closed forms: ``python -m benchmarks.published_flops``.

Reads ``published_training.csv`` and ``models.csv`` in the folder ``--data``. Prints for each source the
number of rows, the number of rows with settings for the generator, the largest deviation from
``model_tflop_per_step`` (one convention for all sources), and the median deviation from the rate that the
source prints (in the convention of the source). ``--rows`` prints each row. Exits with 1 if a fully specified
row with settings deviates by more than 1 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isnan, nan
from pathlib import Path
from typing import NamedTuple

from hespas.generators.llm.layout import check_layout
from hespas.generators.llm.published import (
    PublishedRun,
    convention_of,
    published_flops,
    publisher_flops,
    rows_of,
    run_of,
)
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import HespasError
from tools.published_settings import with_settings

__all__ = ["Compared", "compared", "main"]

_DATA = Path(__file__).parents[1].parent / "shared" / "data" / "published_e2e"
_MOST = 0.01


class Compared(NamedTuple):
    """A row of the table, numbered from 0, with its relative deviations from the column and from the printed
    rate (NaN if unknown). ``refused`` is the reason why the row has no settings.
    """

    number: int
    row: Mapping[str, str]
    run: PublishedRun | None = None
    of_column: float = nan
    of_rate: float = nan
    refused: str = ""

    @property
    def judged(self) -> bool:
        """True if the row counts for the bound: it is fully specified and has settings."""
        return self.row.get("fully_specified") == "yes" and self.run is not None


def compared(data: Path) -> Iterator[Compared]:
    """Yield the comparison of every row of the table."""
    for number, row in enumerate(map(with_settings, rows_of(data / "published_training.csv"))):
        try:
            run = run_of(row, f"row {number}", Diagnostics(), data / "published_training.csv")
            check_layout(run.model, run.layout, run.training)
        except HespasError as error:
            yield Compared(number, row, refused=error.message)
            continue
        column = _number(row, "model_tflop_per_step") * 1e12
        rate = _number(row, "model_tflops_per_gpu")
        rate = _number(row, "hw_tflops_per_gpu") if isnan(rate) else rate
        printed = rate * 1e12 * run.layout.ranks * _number(row, "step_time_ms") / 1e3
        yield Compared(
            number, row, run, published_flops(run) / column - 1, publisher_flops(run) / printed - 1
        )


def _number(row: Mapping[str, str], column: str) -> float:
    return float(row.get(column) or nan)


def _known(values: Iterator[float]) -> list[float]:
    return [each for each in values if not isnan(each)]


def _of_source(source: str, rows: Sequence[Compared]) -> str:
    taken = [each for each in rows if each.run]
    column = [abs(each) for each in _known(each.of_column for each in taken)]
    rates = _known(each.of_rate for each in taken)
    kinds = Counter(convention_of(each.row).value for each in taken if not isnan(each.of_rate))
    own = "+".join(sorted(kinds)) or "-"
    median = f"{statistics.median(rates):+8.2%}" if rates else "-"
    return (
        f"{source:16} {len(rows):5} {len(taken):9} {len(column):9} {max(column, default=nan):9.3%} "
        f"{own:>10} {len(rates):6} {median:>8}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Return 1 if a row exceeds the bound or none is comparable, else 0."""
    parser = argparse.ArgumentParser("python -m benchmarks.published_flops", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=_DATA, help="folder of published runs (default: %(default)s)"
    )
    parser.add_argument("--rows", action="store_true", help="print each row")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        print(f"skipped: folder {options.data} not found; pass --data")
        return 0
    found = list(compared(options.data))
    if options.rows:
        for each in found:
            deviations = (
                each.refused or f"{each.of_column:+.4%} from the column, {each.of_rate:+.4%} from the rate"
            )
            print(f"{each.number:4} {each.row['source']:16} {each.row['model']:24} {deviations}")
    by_source: defaultdict[str, list[Compared]] = defaultdict(list)
    for each in found:
        by_source[each.row["source"]].append(each)
    print(
        f"{'source':16} {'rows':>5} {'settings':>9} {'in column':>9} {'largest':>9} {'convention':>10} "
        f"{'rows':>6} {'median':>8}"
    )
    for source, rows in sorted(by_source.items()):
        print(_of_source(source, rows))
    for reason, count in Counter(each.refused for each in found if each.refused).items():
        print(f"{count} without settings: {reason}")
    judged = [each for each in found if each.judged]
    off = [each for each in judged if not abs(each.of_column) <= _MOST]
    largest = max((abs(each.of_column) for each in judged), default=inf)
    print(
        f"{len(judged)} fully specified rows: {len(off)} more than {_MOST:.0%} off, the largest {largest:.3%}"
    )
    return int(bool(off) or not judged)


if __name__ == "__main__":
    sys.exit(main())
