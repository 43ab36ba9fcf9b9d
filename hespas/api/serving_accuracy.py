"""How far predicted times of servers are from measured runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hespas.api.arguments import checked
from hespas.api.io import Result
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    import pandas

    from hespas.validators.serving import Calibrate, RunReplay, ServingErrors

__all__ = ["ServingAccuracyReport", "validate_serving"]


@dataclass(frozen=True, slots=True, repr=False)
class ServingAccuracyReport(Result):
    """Measured runs of servers beside their predictions, and recorded runs that were repeated."""

    judgement: ServingErrors
    recorded: tuple[RunReplay, ...]
    inputs: tuple[str, ...]
    diagnostics: Diagnostics

    def headline(self) -> str:
        """How many runs are judged, and how far they are off."""
        rows, traces = self.judgement.rows, {each.trace for each in self.recorded}
        parts = [f"{len(traces):,} recorded runs repeated"] if traces else []
        if rows:
            count = sum(each.status == "predicted" for each in rows)
            of_all = [each for each in self.judgement.summaries() if each.by == "all"]
            errors = [f"median error of {each.metric} {each.median_ape:.1%}" for each in of_all if each.n]
            parts = [f"{count:,} of {len(rows):,} runs judged", *errors, *parts]
        return ", ".join(parts) or "nothing judged"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.serving_accuracy/1``."""
        from hespas.validators.serving import serving_json

        return serving_json(self.judgement, self.recorded, self.inputs, self.diagnostics)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per run of the table, or per recorded one where there is no table."""
        import pandas as pd

        document = self.to_dict()
        return pd.json_normalize(document["rows"] or document["recorded"])


@checked(Calibrate="hespas.validators.serving:Calibrate")
def validate_serving(
    table: str | Path | None = None,
    *,
    recorded: tuple[str | Path, str | Path] | None = None,
    split: str = "",
    calibrate: Calibrate = "none",
    estimator: str = "composite",
    progress: Callable[[int, int], None] | None = None,
    diagnostics: Diagnostics | None = None,
) -> ServingAccuracyReport:
    """Measured runs of servers beside their predicted times to the first token and per token.

    ``table`` has a run a row, with means over its requests (columns: ``model_path, system, backend, mode,
    isl, osl, tp_size, silicon_ttft_ms, silicon_tpot_ms`` and others of aiconfigurator's sample of
    measurements); rows of ``split`` are judged (empty: all). ``recorded`` are two tables, of runs and of
    their requests, which are repeated request by request: the fifth that was done first calibrates, all
    others are compared.

    ``calibrate``: ``none``; ``one-per-stack``, on one run of each device and framework;
    ``one-per-deployment``, on one of each release, model and format of these; ``stack``, few parameters of
    each device and framework, and of mixtures each format of experts, on all rows but those of the split
    ``devval``; ``stack-and-one``, these, then one run of each deployment; ``stack-and-deployment``, these,
    then all runs of each. Raises ``UsageError`` for another word, a split without rows and no input, and
    ``FormatError`` for a malformed table.
    """
    from hespas.validators.serving import (
        ServingErrors,
        ServingPredictor,
        evaluate_runs,
        read_recorded,
        read_rows,
        refuse_empty_split,
        replay_runs,
    )

    if table is None and recorded is None:
        raise UsageError("nothing to evaluate", hint="name runs (`table`), or recorded ones (`recorded`)")
    found = diagnostics if diagnostics is not None else Diagnostics()
    judgement, replays = ServingErrors(calibrate=calibrate, rows=()), list["RunReplay"]()
    if table is not None:
        rows = read_rows(Path(table))
        refuse_empty_split(rows, split)
        maker = ServingPredictor(estimator=estimator, progress=progress)
        judgement = evaluate_runs(rows, calibrate=calibrate, split=split, predictor=maker)
        _say_refused(judgement, str(table), found)
    if recorded is not None:
        runs = read_recorded(Path(recorded[0]), Path(recorded[1]), diagnostics=found)
        replays = replay_runs(runs, estimator=estimator, diagnostics=found)
    inputs = tuple(str(each) for each in (table, *(recorded or ())) if each is not None)
    return ServingAccuracyReport(judgement, tuple(replays), inputs, found)


def _say_refused(judgement: ServingErrors, table: str, diagnostics: Diagnostics) -> None:
    """Rows that are not predicted are findings."""
    for each in judgement.rows:
        if each.status not in {"predicted", "calibrating"}:
            diagnostics.info("serving.not-predicted", f"row {each.row.row}", each.status, path=table)
    calibrating = sum(each.status == "calibrating" for each in judgement.rows)
    if calibrating:
        diagnostics.info(
            "serving.calibrating",
            table,
            "rows that were fitted on are not judged; `split` devval in the table keeps rows from fits",
            count=calibrating,
        )
