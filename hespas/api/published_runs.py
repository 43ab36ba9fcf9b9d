"""The league: every published run of a table predicted and judged, and the calibration of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from hespas.api.arguments import checked
from hespas.api.io import Result
from hespas.graph.errors import UsageError
from hespas.graph.hints import PositiveInt

if TYPE_CHECKING:
    import pandas

    from hespas.graph import Diagnostics
    from hespas.validators.league.document import League
    from hespas.validators.league.fit import Factor
    from hespas.validators.league.judged import CalibrateBy, Calibration
    from hespas.validators.league.predict import LeagueRow

__all__ = ["FactorsReport", "LeagueReport", "calibrate_end_to_end", "league"]


@dataclass(frozen=True, slots=True, repr=False)
class LeagueReport(Result):
    """Rows of a table beside their predictions."""

    result: League

    def headline(self) -> str:
        """How many rows are predicted, and how far they are off."""
        whole = self.result.whole
        if whole is None:
            return f"{self.result.table}, no row is both predicted and measured"
        return (
            f"{self.result.table}, calibration {self.result.calibrate}: {whole.n:,} of "
            f"{len(self.result.rows):,} rows, median error {whole.median_ape:.1%}, mean {whole.mean_ape:.1%}"
        )

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.league/1``."""
        from hespas.validators.league.document import league_json

        return league_json(self.result)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per row of the table."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["rows"])

    def write(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a page, the document and a CSV file into a folder. Raises ``OutputError`` where one exists,
        without ``overwrite``.
        """
        from hespas.validators.league.report import write_report

        write_report(self.result, Path(folder), overwrite=overwrite)


@checked(CalibrateBy="hespas.validators.league.judged:CalibrateBy", Diagnostics="hespas.graph:Diagnostics")
def league(
    table: str | Path,
    *,
    calibrate: CalibrateBy = "none",
    factors: str | Path | None = None,
    estimator: str = "composite",
    jobs: PositiveInt = 2,
    progress: Callable[[int, int], None] | None = None,
    diagnostics: Diagnostics | None = None,
) -> LeagueReport:
    """The step of every row of ``table`` (the columns of ``docs/league.md``), predicted from its settings
    and judged beside its ``step_time_ms``; models that do not ship are read from ``models.csv`` beside it.

    ``calibrate``: ``none``; ``one-per-accelerator``, on one row of each accelerator and source;
    ``leave-group-out``, each source, model and accelerator on all other rows. ``factors`` instead: a file of
    :func:`calibrate_end_to_end`, of other rows; nothing is fitted to the table, which needs no measured
    times. Rows are predicted by ``jobs`` processes and kept between runs; ``diagnostics`` is told where they
    cannot be. Raises ``UsageError`` for another word and for factors of another ``estimator``,
    ``FormatError`` for a table that is none, measured figures that cannot be and a file without factors, and
    where no row can be predicted (``UnsupportedError`` where none is at fault).
    """
    from hespas.validators.league.document import league_of, read_factors
    from hespas.validators.league.predict import predicted_rows

    if factors is not None and calibrate != "none":
        raise UsageError(f"`factors` and `calibrate={calibrate}`", hint="one of both")
    known = [] if factors is None else read_factors(Path(factors), estimator)
    rows = predicted_rows(
        Path(table), estimator=estimator, jobs=jobs, progress=progress, diagnostics=diagnostics
    )
    mode: Calibration = calibrate if factors is None else "factors"
    if known and diagnostics is not None:
        _say_without_factors(rows, known, str(factors), diagnostics)
    return LeagueReport(league_of(str(table), rows, mode, known, estimator=estimator))


def _say_without_factors(
    rows: Sequence[LeagueRow], factors: Sequence[Factor], path: str, diagnostics: Diagnostics
) -> None:
    """Rows that no factor is of are findings: they stay as they are predicted."""
    of = {(each.source, each.accelerator) for each in factors}
    missed = [row for row in rows if (row.cells.get("source", ""), row.cells["accelerator"]) not in of]
    if missed:
        names = sorted({" on ".join(pair) for pair in of})
        diagnostics.warning(
            "league.no-factors",
            path,
            f"no factor is of their source and accelerator, they stay as they are: it has {', '.join(names)}",
            count=len(missed),
        )


@dataclass(frozen=True, slots=True, repr=False)
class FactorsReport(Result):
    """The factors of an accelerator in each software stack of a table, and what they are worth on groups that
    were left out of their fit.
    """

    hardware: str
    before: League
    after: League

    def headline(self) -> str:
        """How far steps are off before and on groups left out."""
        errors = [_of_device(done, self.hardware) for done in (self.before, self.after)]
        return f"{self.hardware}, median error {errors[0]:.1%} before, {errors[1]:.1%} on groups left out"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.league_factors/1``."""
        from hespas.validators.league.document import factors_json

        return factors_json(self.before, self.after, self.hardware)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per factor."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["factors"])


def _of_device(done: League, hardware: str) -> float:
    found = (each.median_ape for each in done.groups if (each.by, each.value) == ("accelerator", hardware))
    return next(found, nan)


def calibrate_end_to_end(
    hardware: str,
    table: str | Path,
    *,
    estimator: str = "composite",
    jobs: PositiveInt = 2,
    progress: Callable[[int, int], None] | None = None,
    diagnostics: Diagnostics | None = None,
) -> FactorsReport:
    """By how much each component of a step takes longer on ``hardware`` than predicted, per software stack
    (the column ``source``), fitted on all rows of ``table`` with shrinkage to the fits per operation. They
    hold for what ``estimator`` says.

    Raises ``UsageError`` where the table has no measured row of the device, and as :func:`league` does.
    """
    from hespas.hardware import load_device
    from hespas.validators.league.document import league_of
    from hespas.validators.league.predict import predicted_rows

    name = load_device(hardware).name
    rows = predicted_rows(
        Path(table), estimator=estimator, jobs=jobs, progress=progress, diagnostics=diagnostics
    )
    before, after = (
        league_of(str(table), rows, mode, estimator=estimator) for mode in ("none", "leave-group-out")
    )
    if not any(each.accelerator == name for each in after.factors):
        raise UsageError(
            f"no row of {table} is of {name}, predicted and measured", hint="name another device"
        )
    return FactorsReport(name, before, after)
