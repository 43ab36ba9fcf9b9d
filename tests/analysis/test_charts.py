"""Charts of measured and simulated steps have the values of the tables, and of the spans and gaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.analysis.charts import bandwidth_chart, idle_chart, roofline_chart
from hespas.analysis.device_use import WHOLE_DEVICE
from hespas.analysis.spans import SpanColumns, drawn_spans, timeline_of
from hespas.hardware import named_device
from hespas.report.charts import AreaChart, Waterfall
from hespas.report.timelines import FlameGraph, TimelineChart
from tests.analysis.raw import FIXTURE

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHARDED = FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"


def test_gaps_by_length_are_all_gaps_of_the_device() -> None:
    tables = hespas.analyze(FIXTURE).tables
    lengths, idle = tables.idle_lengths, tables.idle
    device = idle.take(idle["stream"] == WHOLE_DEVICE)
    for cause in set(device["cause"].tolist()):
        own = lengths.take(lengths["cause"] == cause)
        assert own["count"].sum() == device["count"][device["cause"] == cause].sum()
        assert own["total_ns"].sum() == pytest.approx(device["total_ns"][device["cause"] == cause].sum())
        mean = own["total_ns"] / own["count"]
        assert ((own["from_ns"] <= mean) & (mean < own["to_ns"])).all()
    chart = idle_chart(lengths)
    assert chart is not None
    assert sum(layer.sum() for layer in chart.heights.values()) == pytest.approx(lengths["total_ns"].sum())


def test_the_timeline_has_all_device_events_and_the_critical_path() -> None:
    tables = hespas.analyze(FIXTURE).tables
    spans = tables.spans.drawn()
    assert spans["count"].sum() == sum(map(len, tables.spans.recordings))
    busy = tables.breakdown["compute_ns"][0] + tables.breakdown["communication_ns"][0]
    assert (spans["end_ns"] - spans["start_ns"]).sum() >= busy
    segments = tables.critical_segments
    on_path = segments.take(np.isin(segments["kind"], ["compute", "communication", "memory"]))
    assert spans["is_critical"].sum() == len(on_path)
    critical = spans.take(spans["is_critical"])
    assert sorted(critical["operation"].tolist()) == sorted(on_path["name"].tolist())


def columns(count: int) -> SpanColumns:
    start = np.arange(count, dtype=np.float64)
    zero = np.zeros(count, np.int64)
    return SpanColumns(
        rank=zero, lane=np.arange(count) % 2, kind=zero, name=zero, op_class=zero, start_ns=start,
        end_ns=start + 0.5, is_critical=np.arange(count) % 1000 == 0, lanes=["a", "b"], kinds=["compute"],
        names=["op"], classes=["matmul"],
    )  # fmt: skip


def test_spans_are_merged_only_if_there_are_many() -> None:
    few = drawn_spans(columns(90_000))
    assert len(few) == 90_000
    many = drawn_spans(columns(400_000))
    assert len(many) <= 130_000
    assert many["count"].sum() == 400_000
    assert many["operation"][0] == f"{many['count'][0]} of matmul"
    assert many["end_ns"].max() == 399_999.5
    assert many["is_critical"].sum() == 400
    chart = timeline_of(many)
    assert chart is not None
    assert [lane.label for lane in chart.lanes] == ["a", "b"]
    assert all((np.diff(lane.start_ns) > 0).all() for lane in chart.lanes)


def test_charts_of_a_simulated_step_have_its_values() -> None:
    done = hespas.simulate(SHARDED, "H100-SXM")
    charts = {chart.name: chart for chart in done.charts()}
    timeline, memory = charts["timeline"], charts["memory-0"]
    assert isinstance(timeline, TimelineChart)
    assert timeline.end_ns == pytest.approx(done.step_ns)
    assert sum(len(lane.start_ns) for lane in timeline.lanes) == len(done.timeline)
    assert isinstance(memory, AreaChart)
    height = np.sum(list(memory.layers.values()), axis=0).max()
    assert height == pytest.approx(done.memory[0].use.peak_bytes)
    assert memory.limit == done.memory[0].capacity_bytes
    page = done.to_html()
    assert "90 % interval" in page
    assert "fits the" in page


def test_no_chart_without_its_data() -> None:
    operations = hespas.analyze(FIXTURE).tables.operations
    unknown = np.full(len(operations), np.nan)
    assert roofline_chart(operations, named_device("H100-SXM"), unknown) is None
    collectives = hespas.analyze(FIXTURE).tables.collectives
    assert bandwidth_chart(collectives.take(np.zeros(0, np.int64))) is None
    names = [chart.name for chart in hespas.simulate(FIXTURES / "stablehlo" / "mlp.mlir").charts()]
    assert "roofline" not in names


def test_a_difference_is_drawn_as_waterfalls() -> None:
    done = hespas.analyze(FIXTURE, baseline=FIXTURE)
    (parts,) = (chart for chart in done.charts() if isinstance(chart, Waterfall))
    assert parts.before == parts.after
    assert parts.steps() == []


def test_the_flame_graph_has_the_time_of_the_tree() -> None:
    done = hespas.analyze(FIXTURE)
    graph = done.plot("flame-graph")
    assert isinstance(graph, FlameGraph)
    tree = done.tables.tree
    widths = {graph.names[row]: width for row, _, width, depth in graph.frames() if depth == 0}
    roots = tree.take(tree["depth"] == 0)
    for name, share in zip(roots["name"].tolist(), roots["share"].tolist(), strict=True):
        assert widths.get(name, 0.0) == pytest.approx(share, abs=1e-3)
