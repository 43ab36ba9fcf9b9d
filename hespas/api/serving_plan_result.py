"""Result of a search over server configurations: the best ones, why the others lose, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from typing import ClassVar, Literal

import msgspec

from hespas.api.documents import Document, Result, findings
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.report.charts import Axis, Chart, Plot, Series
from hespas.report.tables import Column, Table, column_of, table_from_rows
from hespas.report.texts import counted

__all__ = [
    "LatencyFigure",
    "ServingObjective",
    "ServingPlanAccount",
    "ServingPlanDocument",
    "ServingPlanResult",
    "ServingPlanRow",
]

LatencyFigure = Literal["mean", "p50", "p90", "p99"]
"""Figure of the requests of a run that limits apply to."""
ServingObjective = Literal["throughput", "price"]


class ServingPlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated configuration of a server at a load. ``hespas serve`` has the same figures with these
    settings and ``requests``. ``load`` is the rate [1/s] or the concurrency of the requests. ``ttft_ms``,
    ``tpot_ms`` and ``latency_ms`` are the percentile of the search. ``limited_by`` is the reason why the next
    load does not hold, with the limits of the scheduler that delayed requests. ``is_within``: the limits hold
    in a run that is long enough. ``is_lower_bound``: the next load was not decided, because its run is too
    short or it is beyond the search. ``equal`` counts the configurations with the same figures. With separate
    ``prefill_servers`` and ``decode_servers``, ``tp``, ``dp``, ``ep`` and ``kv_cache_tokens`` are of a decode
    server.
    """

    hardware: str
    devices: Count
    tp: Count
    dp: Count
    ep: Count
    prefill_servers: Count = 0
    decode_servers: Count = 0
    prefill_tp: Count = 0
    prefill_dp: Count = 0
    prefill_ep: Count = 0
    max_batched_tokens: Count
    max_num_seqs: Count
    chunked: bool
    requests: str
    load: Figure
    is_within: bool
    is_lower_bound: bool = False
    ttft_ms: Figure
    tpot_ms: Figure
    latency_ms: Figure
    requests_per_s: Figure
    output_tokens_per_s: Figure
    output_tokens_per_s_per_device: Figure
    kv_cache_tokens: Figure
    put_back: Count
    price_per_million_tokens: Figure = nan
    limited_by: str = ""
    equal: Count = 1
    basis: str = ""


class ServingPlanAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Account of a search. ``configurations`` is the sum of those against rules of layouts, beyond memory,
    and ``compared``, of which ``within`` hold the limits. ``runs`` counts simulations.
    """

    configurations: Count
    against_rules: Count
    beyond_memory: Count
    compared: Count
    within: Count
    runs: Count


class ServingPlanDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas serve --sla --json``. ``rows`` are the configurations at their highest load,
    the best first; ``frontier`` are the simulated points of the Pareto frontier of latency and throughput per
    device, in the order of latency.
    """

    schema: Literal["hespas.serving-plan/1"] = "hespas.serving-plan/1"
    model: str
    engine: str
    sla_ms: dict[str, Figure]
    percentile: LatencyFigure
    objective: ServingObjective
    currency: str
    sources: list[str]
    account: ServingPlanAccount
    rows: list[ServingPlanRow]
    frontier: list[ServingPlanRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingPlanResult(Result):
    """Configurations of a server at their highest load within latency limits, the best first, and the Pareto
    frontier of all simulated loads. ``setting`` is the searched setting of requests: ``rate`` or
    ``concurrency``.
    """

    page_title: ClassVar[str] = "Configurations of an LLM server"

    model: str
    engine: str
    sla_ms: Mapping[str, float]
    percentile: LatencyFigure
    objective: ServingObjective
    setting: str
    rows: tuple[ServingPlanRow, ...]
    frontier: tuple[ServingPlanRow, ...]
    account: ServingPlanAccount
    currency: str = ""
    sources: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    @property
    def best(self) -> ServingPlanRow:
        """Return the best configuration; without one within the limits, the nearest."""
        return self.rows[0]

    @property
    def limits_text(self) -> str:
        """Return the limits as text."""
        figure = "" if self.percentile == "mean" else f" {self.percentile}"
        mean = "mean " if self.percentile == "mean" else ""
        names = {"ttft": "TTFT", "tpot": "TPOT"}
        return ", ".join(
            f"{mean}{names.get(what, what)}{figure} <= {limit:g} ms" for what, limit in self.sla_ms.items()
        )

    def load_text(self, row: ServingPlanRow) -> str:
        """Return the load of a row with its unit, marked if a higher one may hold too."""
        mark = "at least " if row.is_within and row.is_lower_bound else ""
        if self.setting == "rate":
            return f"{mark}{row.load:,.4g} requests/s"
        return f"{mark}{counted(round(row.load), 'concurrent request')}"

    def headline(self) -> str:
        """Return the summary line: the best configuration and its load."""
        best = self.best
        where = f"{self.model} on {best.devices:,} x {best.hardware} ({self.engine})"
        if not best.is_within and best.is_lower_bound:
            return (
                f"{where}: {best.limited_by} to show {self.limits_text} at {self.load_text(best)} with "
                f"{self.settings_text(best)}"
            )
        if not best.is_within:
            return (
                f"{where}: no configuration holds {self.limits_text}; the nearest has {best.limited_by} at "
                f"{self.load_text(best)} with {self.settings_text(best)}"
            )
        return f"{where}: {self.load_text(best)} with {self.settings_text(best)}, {self.limits_text}"

    def settings_text(self, row: ServingPlanRow) -> str:
        """Return the layout and the limits of a configuration."""

        def layout_of(before: str = "") -> str:
            degrees = ((name, getattr(row, before + name)) for name in ("dp", "tp", "ep"))
            return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "tp1"

        layout = layout_of()
        if row.prefill_servers:
            prefill = f"{row.prefill_servers:,} x {layout_of('prefill_')} prefill"
            layout = f"{prefill} + {row.decode_servers:,} x {layout} decode"
        whole = "" if row.chunked else ", whole prompts"
        tokens, sequences = counted(row.max_batched_tokens, "token"), counted(row.max_num_seqs, "sequence")
        return f"{layout}, {tokens}, {sequences}{whole}"

    def account_text(self) -> str:
        """Return the account of the search as a sentence."""
        account = self.account
        return (
            f"{counted(account.configurations, 'configuration')}: {account.against_rules:,} violate rules of "
            f"layouts, {account.beyond_memory:,} exceed the memory, {account.within:,} of "
            f"{account.compared:,} hold the limits; {counted(account.runs, 'simulation')}, loads 2 % apart"
        )

    def reason(self, row: ServingPlanRow) -> str:
        """Return what a configuration loses against the best one, and its limit. Lower bounds are not
        compared.
        """
        best = self.best
        if row is best or not row.is_within or row.is_lower_bound or best.is_lower_bound:
            return row.limited_by
        name, ratio = "load", (row.load / row.devices) / (best.load / best.devices)
        if self.objective == "price":
            name, ratio = "price", row.price_per_million_tokens / best.price_per_million_tokens
        elif self.setting == "concurrency":
            name = "tokens/s"
            ratio = row.output_tokens_per_s_per_device / best.output_tokens_per_s_per_device
        return f"{name} {ratio - 1:+.1%}: {row.limited_by}"

    def document(self) -> ServingPlanDocument:
        """Return the content of the command's ``--json`` as a typed value."""
        return ServingPlanDocument(
            inputs=list(self.inputs),
            diagnostics=findings(self.diagnostics),
            model=self.model,
            engine=self.engine,
            sla_ms=dict(self.sla_ms),
            percentile=self.percentile,
            objective=self.objective,
            currency=self.currency,
            sources=list(self.sources),
            account=self.account,
            rows=list(self.rows),
            frontier=list(self.frontier),
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.serving-plan/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return one row per configuration at its highest load: settings, figures, and why it loses."""
        return self._rows_table(self.rows)

    def _rows_table(self, rows: tuple[ServingPlanRow, ...]) -> Table:
        price = f"{self.currency} per million tokens"
        counts = (
            "devices", "tp", "dp", "ep", "prefill_servers", "decode_servers", "prefill_tp", "prefill_dp",
            "prefill_ep", "max_batched_tokens", "max_num_seqs",
        )  # fmt: skip
        header = (
            Column("hardware"),
            *(Column(name, name.replace("_", " "), "count") for name in counts),
            Column("chunked", kind="flag"),
            Column("requests"),
            Column("load", kind="number"),
            Column("is_within", kind="flag"),
            Column("is_lower_bound", kind="flag"),
            *(Column(f"{what}_ms", f"{what} ms", "number") for what in ("ttft", "tpot", "latency")),
            Column("requests_per_s", "requests/s", "number"),
            Column("output_tokens_per_s", "tokens/s", "number"),
            Column("output_tokens_per_s_per_device", "tokens/s per device", "number"),
            column_of("kv_cache_tokens"),
            Column("put_back", "preemptions", "count"),
            Column("price_per_million_tokens", price, "number", write="{:,.4g}".format),
            Column("equal", kind="count"),
            Column("basis"),
            Column("loses_by", "loses by"),
        )
        return table_from_rows(
            header,
            [(*(getattr(row, column.name) for column in header[:-1]), self.reason(row)) for row in rows],
        )

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the configurations, the frontier, the account of the search, and the sources of prices."""
        counts = msgspec.structs.asdict(self.account)
        header = (Column("figure"), Column("value", kind="number"))
        tables = {
            "configurations": self.table(),
            "frontier": self._rows_table(self.frontier),
            "search": table_from_rows(
                header, [(name.replace("_", " "), value) for name, value in counts.items()]
            ),
        }
        if self.sources:
            tables["sources"] = table_from_rows((Column("source"),), [(text,) for text in self.sources])
        return tables

    def charts(self) -> tuple[Chart, ...]:
        """Return the Pareto frontier of throughput per device and latency, with the best point of each
        configuration.
        """
        groups = {"configurations": self.rows, "Pareto frontier": self.frontier}
        return (
            Plot(
                name="pareto",
                title="Throughput per device over the latency",
                table="frontier",
                note="Line: no simulated load has more tokens/s per device and a shorter latency.",
                x=Axis(f"latency ({self.percentile})", "time", is_log=True),
                y=Axis("output tokens/s per device", "number"),
                series=[
                    Series(
                        label=label,
                        x=[row.latency_ms * 1e6 for row in rows],
                        y=[row.output_tokens_per_s_per_device for row in rows],
                        texts=[f"{self.settings_text(row)}: {self.load_text(row)}" for row in rows],
                        mark="points" if rows is self.rows else "steps",
                    )
                    for label, rows in groups.items()
                    if rows
                ],
            ),
        )

    def has_prices(self) -> bool:
        """Return True if a row has a price."""
        return any(not isnan(row.price_per_million_tokens) for row in self.rows)
