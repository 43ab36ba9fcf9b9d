"""Throughput-latency curves of servers: measured and predicted TPOT over the output throughput, by load."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from hespas.report.charts import Axis, Plot, Series
from hespas.report.texts import counted
from hespas.studies.serving.evaluation import EvaluatedRun
from hespas.studies.serving.predict import MeanTimes, implied_rate

__all__ = ["load_curves"]

_FEWEST_LOADS, _MOST_CURVES = 3, 6


def load_curves(runs: Sequence[EvaluatedRun]) -> Iterator[Plot]:
    """Yield the curve of each deployment and request shape with the most loads: the points are numbers of
    concurrent requests. The throughput follows from mean TTFT and TPOT. Runs without a prediction are left
    out.
    """
    groups: dict[Hashable, list[EvaluatedRun]] = {}
    for run in runs:
        row = run.row
        if run.predicted is not None:
            deployment = (row.model, row.hardware, row.engine, row.release, row.precision, row.layout)
            groups.setdefault((deployment, row.prompt, row.output, row.ratio), []).append(run)
    loads = {key: {run.row.concurrency for run in group} for key, group in groups.items()}
    several = [key for key in groups if len(loads[key]) >= _FEWEST_LOADS]
    for number, key in enumerate(sorted(several, key=lambda key: -len(loads[key]))[:_MOST_CURVES]):
        group = sorted(groups[key], key=lambda run: run.row.concurrency)
        row = group[0].row
        curves: dict[str, tuple[list[float], list[float], list[str]]] = {}
        for run in group:
            measured = MeanTimes(run.row.ttft_ms, run.row.tpot_ms)
            for label, times in (("measured", measured), ("predicted", run.predicted)):
                if times is not None:
                    x, y, texts = curves.setdefault(label, ([], [], []))
                    x.append(implied_rate(run.row, times) / run.row.ranks)
                    y.append(times.tpot_ms * 1e6)
                    texts.append(f"{label}, {run.row.concurrency:,} concurrent requests")
        series = [
            Series(label=label, x=x, y=y, texts=texts, mark="curve")
            for label, (x, y, texts) in curves.items()
        ]
        yield Plot(
            name=f"load-curve-{number}",
            title=f"Throughput and latency: {row.model} on {counted(row.ranks, row.hardware)}",
            table="rows",
            note=f"{row.engine} {row.release}, {row.precision}, {row.prompt:,} input and {row.output:,} "
            "output tokens; each point is a number of concurrent requests.",
            x=Axis("output tokens/s per device", "number"),
            y=Axis("TPOT", "time"),
            series=series,
        )
