"""The league: every published run of a table predicted and judged, and the calibration of a site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hespas.api.io import Result
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    import pandas

    from hespas.validators.league.document import League
    from hespas.validators.league.judged import Calibration

__all__ = ["LeagueReport", "league"]


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


def league(
    table: str | Path,
    *,
    calibrate: Calibration = "none",
    estimator: str = "composite",
    jobs: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> LeagueReport:
    """The step of every row of ``table`` (the columns of ``docs/league.md``), predicted from its settings
    and judged beside its ``step_time_ms``; models that do not ship are read from ``models.csv`` beside it.

    ``calibrate``: ``none``; ``one-per-accelerator``, on one row of each accelerator and source;
    ``leave-group-out``, each source, model and accelerator on all other rows. Rows are predicted by ``jobs``
    processes and kept between runs. Raises ``UsageError`` for another word, ``FormatError`` for a table that
    is none.
    """
    from hespas.validators.league.document import league_of
    from hespas.validators.league.judged import CALIBRATIONS
    from hespas.validators.league.predict import predicted_rows

    if calibrate not in CALIBRATIONS:
        raise UsageError(f"no calibration '{calibrate}'", hint=f"one of {', '.join(CALIBRATIONS)}")
    rows = predicted_rows(Path(table), estimator=estimator, jobs=jobs, progress=progress)
    return LeagueReport(league_of(str(table), rows, calibrate))
