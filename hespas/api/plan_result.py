"""Result of a search over layouts: the best ones, why the others lose, and the proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from typing import ClassVar, Literal

import msgspec
import numpy as np

from hespas.api.documents import Document, Result, findings
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.llm.space import AXES
from hespas.graph import Diagnostics
from hespas.graph.columns import pareto_rows
from hespas.report.charts import Axis, Chart, HeatMap, Plot, Series
from hespas.report.tables import Column, Table, column_of, table_from_rows
from hespas.report.texts import count_text, counted, time_text

__all__ = ["PlanDocument", "PlanProof", "PlanResult", "PlanRow"]

_RECOMPUTED = 0.002
"""Difference of FLOPs, relative to the FLOPs of the model, that counts as recomputation."""


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated layout. ``compute_ns``, ``exposed_comm_ns`` and ``bubble_ns`` (waits for other stages and for
    the host) are means over all ranks; their sum is ``step_ns``. ``hardware_flops_ratio`` is the ratio of all
    FLOPs to the FLOPs of the model. ``is_lower_bound``: the step has operations of unknown time, which
    ``lower_bound_reason`` lists. ``basis`` has the shares of the bases of estimates. ``energy_j`` is of all
    devices in a step. ``peak_memory_bytes`` is the memory of all tensors, ``device_memory_bytes`` the memory
    that the device must have.
    """

    settings: dict[str, int | str]
    hardware: str
    devices: int
    link_bandwidth: float = 1.0
    step_ns: Figure
    step_low_ns: Figure
    step_high_ns: Figure
    mfu: Figure
    tokens_per_s: Figure
    peak_memory_bytes: Figure
    device_memory_bytes: Figure
    compute_ns: Figure
    exposed_comm_ns: Figure
    bubble_ns: Figure
    hardware_flops_ratio: Figure
    is_lower_bound: bool = False
    lower_bound_reason: str = ""
    basis: str = ""
    price_per_million_tokens: Figure = nan
    energy_j: Figure = nan
    energy_low_j: Figure = nan
    energy_high_j: Figure = nan


class PlanProof(msgspec.Struct, frozen=True):
    """Account of a search, as counts of layouts whose sum is ``layouts``: a layout exceeds the memory,
    exceeds the price limit (by its bound or when simulated), has a bound above ``limit``, or was simulated.
    ``limit`` is a value of the objective (ns, price or J).
    """

    layouts: Count
    beyond_memory: Count
    beyond_price: Count
    bounded: Count
    simulated: Count
    limit: Figure


class PlanDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas plan --json``. ``rows`` are simulated layouts, the best first."""

    schema: Literal["hespas.plan/1"] = "hespas.plan/1"
    model: str
    objective: str
    margin: Figure
    currency: str
    sources: list[str]
    proof: PlanProof
    rows: list[PlanRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult(Result):
    """Simulated layouts of a training step, the best first, and the account of the search. ``sources`` has
    one sentence about each price and power.
    """

    page_title: ClassVar[str] = "Layouts of a training step"

    model: str
    objective: Literal["time", "price", "energy"]
    margin: float
    rows: tuple[PlanRow, ...]
    proof: PlanProof
    currency: str = ""
    sources: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    @property
    def best(self) -> PlanRow | None:
        """Return the best layout; None if no layout fits."""
        return self.rows[0] if self.rows else None

    def headline(self) -> str:
        """Return the summary line: the best layout and its value of the objective."""
        best = self.best
        if best is None:
            proof = self.proof
            dear = f", {_with_verb(proof.beyond_price, 'exceeds', 'exceed')} the price limit"
            return (
                f"{self.model}: none of {counted(proof.layouts, 'layout')} fits: "
                f"{_with_verb(proof.beyond_memory, 'exceeds', 'exceed')} the memory"
                f"{dear if proof.beyond_price else ''}"
            )
        step = f"{'at least ' if best.is_lower_bound else ''}{time_text(best.step_ns)}"
        if self.objective != "time":
            step = f"{_value_text(self._value(best), self.objective, self.currency)}, {step}"
        return f"{self.model} on {best.devices:,} {best.hardware}: {step} with {self.layout_text(best)}"

    def layout_text(self, row: PlanRow) -> str:
        """Return the settings of a layout that are not 1 or off."""
        shown = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in row.settings.items()
            if value not in {1, "", "none"} or name == "zero"
        ]
        if row.settings["pp"] == 1:
            shown = [text for text in shown if not text.startswith("schedule ")]
        return ", ".join(shown)

    def proof_text(self) -> str:
        """Return the account of the search as a sentence, and one about steps that are lower bounds."""
        proof = self.proof
        if not self.rows:
            return f"{self.headline()}."
        limit = _value_text(proof.limit, self.objective, self.currency)
        dear = _with_verb(proof.beyond_price, "exceeds", "exceed")
        memory = f"{_with_verb(proof.beyond_memory, 'exceeds', 'exceed')} the memory"
        if any(entry.code == "plan.memory-unknown" for entry in self.diagnostics):
            memory += " (not checked where its capacity is unknown)"
        better = {"time": "faster", "price": "cheaper", "energy": "more frugal"}[self.objective]
        partial = [row for row in self.rows if row.is_lower_bound]
        text = (
            f"{counted(proof.layouts, 'layout')} in the space: {memory}"
            f"{f', {dear} the price limit' if proof.beyond_price else ''}, "
            f"{_with_verb(proof.bounded, 'has', 'have')} a bound above {limit}, "
            f"{_with_verb(proof.simulated, 'was', 'were')} simulated; "
            f"no {'complete step' if partial else 'layout'} is {better} than {limit} "
            f"(margin {self.margin:.1%})."
        )
        if not partial:
            return text
        ranks = _with_verb(len(partial), "step is a lower bound and ranks", "steps are lower bounds and rank")
        reason = partial[0].lower_bound_reason or "operations have no time"
        return f"{text} {ranks} after complete steps: {reason}."

    def _value(self, row: PlanRow) -> float:
        values = {"time": row.step_ns, "price": row.price_per_million_tokens, "energy": row.energy_j}
        return values[self.objective]

    def reason(self, row: PlanRow) -> str:
        """Return the part of the step in which a layout loses most against the best one."""
        best = self.best
        if best is None or row is best:
            return ""
        if (row.hardware, row.devices, row.link_bandwidth) != (
            best.hardware,
            best.devices,
            best.link_bandwidth,
        ):
            return "another cluster"
        parts = {
            "bubble": row.bubble_ns - best.bubble_ns,
            "exposed communication": row.exposed_comm_ns - best.exposed_comm_ns,
            "compute": row.compute_ns - best.compute_ns,
        }
        name, more_ns = max(parts.items(), key=lambda part: part[1])
        if name == "compute":
            recomputes = row.hardware_flops_ratio - best.hardware_flops_ratio > _RECOMPUTED
            name = "recomputation" if recomputes else "compute efficiency"
        return f"{name} +{time_text(more_ns)}" if more_ns > 0 else "equal parts"

    def document(self) -> PlanDocument:
        """Return the content of the command's ``--json`` as a typed value."""
        return PlanDocument(
            inputs=list(self.inputs),
            diagnostics=findings(self.diagnostics),
            model=self.model,
            objective=self.objective,
            margin=self.margin,
            currency=self.currency,
            sources=list(self.sources),
            proof=self.proof,
            rows=list(self.rows),
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.plan/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return one row per simulated layout: its settings and figures, and why it loses."""
        price = f"{self.currency} per million tokens"
        header = (
            *(
                Column(name, name.replace("_", " "), "number" if _is_number(name) else "text")
                for name in AXES
            ),
            Column("hardware"),
            Column("devices", kind="count"),
            Column("link_bandwidth", kind="number"),
            *(column_of(f"step{part}_ns") for part in ("", "_low", "_high")),
            Column("mfu", "MFU", "share"),
            Column("tokens_per_s", "tokens/s", "count"),
            column_of("peak_memory_bytes"),
            column_of("device_memory_bytes"),
            *(column_of(f"{part}_ns") for part in ("compute", "exposed_comm", "bubble")),
            Column("hardware_flops_ratio", kind="number"),
            Column("is_lower_bound", kind="flag"),
            Column("lower_bound_reason"),
            Column("basis"),
            Column("price_per_million_tokens", price, "number", write="{:,.4g}".format),
            *(Column(f"energy{part}_j", f"energy{part} J", "number") for part in ("", "_low", "_high")),
            Column("loses_by", "loses by"),
        )
        rows = [
            (
                *(row.settings[name] for name in AXES),
                *(getattr(row, column.name) for column in header[len(AXES) : -1]),
                self.reason(row),
            )
            for row in self.rows
        ]
        return table_from_rows(header, rows)

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the table of layouts, the account of the search, and the sources of prices and power."""
        counts = msgspec.structs.asdict(self.proof)
        header = (Column("figure"), Column("value", kind="number"))
        tables = {
            "layouts": self.table(),
            "search": table_from_rows(
                header, [(name.replace("_", " "), value) for name, value in counts.items() if name != "limit"]
            ),
        }
        if self.sources:
            tables["sources"] = table_from_rows((Column("source"),), [(text,) for text in self.sources])
        return tables

    def charts(self) -> tuple[Chart, ...]:
        """Return the heat map of the objective over the two degrees with the most values, and the Pareto
        frontier of step time and memory, or of step time and price over clusters.
        """
        charts: list[Chart] = []
        degrees = sorted(
            ("tp", "pp", "dp", "cp", "ep", "micro_batch"),
            key=lambda name: -len({row.settings[name] for row in self.rows}),
        )
        counts = [len({row.settings[name] for row in self.rows}) for name in degrees[:2]]
        if self.rows and min(counts) > 1:
            charts.append(self._heat_map(degrees[0], degrees[1]))
        if len(self.rows) > 1:
            charts.append(self._frontier())
        return tuple(charts)

    def _heat_map(self, down: str, across: str) -> HeatMap:
        labels = {
            name: sorted(
                {row.settings[name] for row in self.rows}, key=lambda value: (str(type(value)), value)
            )
            for name in (down, across)
        }
        values = np.full((len(labels[down]), len(labels[across])), nan)
        for row in self.rows:
            cell = labels[down].index(row.settings[down]), labels[across].index(row.settings[across])
            values[cell] = np.fmin(values[cell], row.step_ns)
        return HeatMap(
            name="heat-map",
            title=f"Step by {down.replace('_', ' ')} and {across.replace('_', ' ')}",
            table="layouts",
            note="Frame: the shortest step. Of the simulated layouts, the best of each cell.",
            rows=[str(value) for value in labels[down]],
            columns=[str(value) for value in labels[across]],
            values=values,
            axis=Axis("step", "time"),
            row_title=down.replace("_", " "),
            column_title=across.replace("_", " "),
            best=True,
        )

    def _frontier(self) -> Plot:
        """Return the step over the memory, or over the price if several clusters are compared."""
        clusters = {(row.hardware, row.devices, row.link_bandwidth) for row in self.rows}
        priced = len(clusters) > 1 and all(isfinite(row.price_per_million_tokens) for row in self.rows)

        def cost(row: PlanRow) -> float:
            return row.price_per_million_tokens if priced else row.device_memory_bytes

        figures = [(cost(row), row.step_ns) for row in self.rows]
        frontier = [self.rows[index] for index in pareto_rows(figures)]
        what = "price" if priced else "device memory"
        return Plot(
            name="pareto",
            title=f"Step over the {what}",
            table="layouts",
            note=f"Line: Pareto frontier. No layout with as much or less {what} has a shorter step.",
            x=Axis(
                f"{self.currency} per million tokens" if priced else what, "number" if priced else "bytes"
            ),
            y=Axis("step", "time"),
            series=[
                Series(
                    label="layouts",
                    x=[cost(row) for row in self.rows],
                    y=[row.step_ns for row in self.rows],
                    texts=[f"{self.layout_text(row)}: {time_text(row.step_ns)}" for row in self.rows],
                ),
                Series(
                    label="Pareto frontier",
                    x=[cost(row) for row in frontier],
                    y=[row.step_ns for row in frontier],
                    mark="steps",
                ),
            ],
        )


def _with_verb(count: int, singular: str, plural: str) -> str:
    return f"{count_text(count)} {singular if count == 1 else plural}"


def _is_number(name: str) -> bool:
    return name not in {"recompute", "schedule", "offload"}


def _value_text(value: float, objective: str, currency: str) -> str:
    """Return a value of the objective with its unit."""
    if objective == "time":
        return time_text(value)
    if objective == "price":
        return "unknown" if isnan(value) else f"{value:,.4g} {currency} per million tokens"
    return f"{value:,.4g} J"
