"""Error figures of held-out tests: predictions compared with measured times, and the options of the
commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from hespas.fitting.learned_parts import PARTS, LearnedPart
from hespas.fitting.statistics import error_figures
from hespas.graph.columns import FloatArray
from hespas.measurements import Measurements, read_measurements

__all__ = ["Case", "Figures", "figures", "parser_of", "print_figures", "print_parts", "summary", "text"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Case:
    """Rows of one device that one test leaves out: predictions, intervals and measured times [ns]."""

    test: str
    device: str
    table: str
    low_ns: FloatArray
    duration_ns: FloatArray
    high_ns: FloatArray
    measured_ns: FloatArray


class Figures(Struct, frozen=True, kw_only=True):
    """Errors of the ``n`` of ``of`` rows with a prediction, the share of rows in their 90 % intervals, and
    the median square root of the ratio of interval ends. None without rows.
    """

    n: int
    of: int
    mape: float | None
    median_ape: float | None
    p90_ape: float | None
    bias: float | None
    coverage: float | None
    width: float | None


def figures(cases: Sequence[Case]) -> Figures:
    """Return the figures of all rows of some cases; None for each error without rows."""
    low, predicted, high, measured = (
        np.concatenate(columns)
        for columns in zip(
            *((each.low_ns, each.duration_ns, each.high_ns, each.measured_ns) for each in cases), strict=True
        )
    )
    known = np.isfinite(predicted)
    low, predicted, high, measured = (column[known] for column in (low, predicted, high, measured))
    if not len(predicted):
        return Figures(
            n=0, of=len(known), mape=None, median_ape=None, p90_ape=None, bias=None, coverage=None, width=None
        )
    return Figures(
        n=len(predicted),
        of=len(known),
        coverage=float(((low <= measured) & (measured <= high)).mean()),
        width=float(np.nanmedian(np.sqrt(high / low))),
        **error_figures(predicted / measured - 1),
    )


def summary(every: Sequence[Case]) -> dict[str, Figures]:
    """Return the figures of each test, and of each test, device and table."""
    groups: dict[str, list[Case]] = {}
    for each in every:
        groups.setdefault(each.test, []).append(each)
        groups.setdefault(f"{each.test} | {each.device} | {each.table.partition('_')[0]}", []).append(each)
    return {name: figures(group) for name, group in sorted(groups.items())}


def text(found: Mapping[str, Figures], before: Mapping[str, Figures]) -> str:
    """Return one line of percentages per test and device, followed by the line of another version if it has
    one.
    """
    lines = [f"{'':58}{'n/of':>11}{'MAPE':>7}{'median':>7}{'P90':>7}{'bias':>7}{'cover':>7}{'width':>7}"]
    for name, values in found.items():
        lines.append(_line(name, values))
        if name in before:
            lines.append(_line("    before", before[name]))
    return "\n".join(lines) + "\n"


def _line(label: str, values: Figures) -> str:
    shares = (values.mape, values.median_ape, values.p90_ape, values.bias, values.coverage)
    shown = "".join(f"{'-' if each is None else format(100 * each, '.1f'):>7}" for each in shares)
    width = "-" if values.width is None else f"{values.width:.2f}"
    return f"{label:58}{values.n:5}/{values.of:5}{shown}{width:>7}"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all held-out tests have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--against", type=Path, help="file of --json of another version to compare with")
    return parser


def print_figures(every: Iterable[Case], arguments: argparse.Namespace) -> None:
    """Print the figures, and write them to ``--json`` if given."""
    found = summary(list(every))
    before: dict[str, Figures] = {}
    if arguments.against:
        before = msgspec.json.decode(arguments.against.read_bytes(), type=dict[str, Figures])
    sys.stdout.write(text(found, before))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def print_parts(
    doc: str | None,
    cases: Callable[[LearnedPart, Measurements, int], Iterable[Case]],
    *,
    rows: int,
    rows_help: str,
) -> None:
    """Print the figures of ``cases`` for each learned part and its table. ``rows`` is the default of
    ``--rows``, the largest number of rows of a device.
    """
    parser = parser_of(doc)
    parser.add_argument("--part", action="append", help="parts of the learned models (default: all)")
    parser.add_argument("--rows", type=int, default=rows, help=rows_help)
    arguments = parser.parse_args()
    parts = [part for part in PARTS if not arguments.part or part.name in arguments.part]
    print_figures(
        (
            case
            for part in parts
            for path in sorted(arguments.tables.glob(f"{part.table}.*"))[:1]
            for case in cases(part, read_measurements(path), arguments.rows)
        ),
        arguments,
    )
