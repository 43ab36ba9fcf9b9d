"""Pages of results: charts as in Python, with names and links, at any browser width."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hespas
from hespas import api
from hespas.api.documents import Result
from hespas.api.grid_rows import Grid
from hespas.graph.errors import UsageError
from tests.browser import FAULTS, needs_browser, seen_by

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROFILE = FIXTURES / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"
SHARDED = FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"

REQUESTS = "poisson:rate=4,prompt=128,output=16,requests=30"


def grid() -> Result:
    sources = (str(FIXTURES / "stablehlo" / "mlp.mlir"), str(SHARDED))
    axes = {"source": sources, "hardware": ("H100-SXM", "A100-SXM-80GB"), "precision": ("bf16", "f32")}
    return api.simulate_grid(Grid("", axes, {"estimator": "roofline"}))


def difference() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("before.json", "after.json")]
        for path, hardware in zip(paths, ("H100-SXM", "A100-SXM-80GB"), strict=True):
            path.write_bytes(hespas.simulate(SHARDED, hardware, estimator="roofline").to_json())
        return api.compare_runs(*paths)


def accuracy_difference() -> Result:
    header = "kind,m,n,k,dtype,hardware,duration_ns"
    rows = [
        f"matmul,{size},{size},{size},bf16,H100-SXM,{size**3 / 2e5:.0f}" for size in range(512, 4096, 512)
    ]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "timed.csv")
        table.write_text("\n".join([header, *rows]), encoding="utf-8")
        reports = [hespas.accuracy(table=table, estimator=name) for name in ("roofline", "systolic")]
        return hespas.compare(*reports)


def measured(*, estimators: tuple[str, ...] = ("roofline",)) -> Result:
    return hespas.accuracy(PROFILE, hardware="H100-SXM", estimator=estimators)


def published() -> Result:
    columns = (
        "source,framework,accelerator,num_accelerators,model,seq_len,global_batch,micro_batch,dp,tp,pp,vp,cp,"
        "fsdp,recompute,precision,precision_class,step_time_ms,mfu_pct"
    )
    rows = [
        f"here,MaxText,TPU-v5e,{count},Llama-3-8B,2048,{count},1,{count},1,1,1,1,fsdp,remat_policy full,bf16,"
        f"16bit,{time},40"
        for count, time in ((8, 1500), (16, 1550), (32, 1600))
    ]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "runs.csv")
        table.write_text("\n".join([columns, *rows]), encoding="utf-8")
        return hespas.league(table, jobs=1)


ACCURACY = {"predicted", "error-distribution", "waterfall", "errors-by-class", "timeline"}

RESULTS: dict[str, tuple[Callable[[], Result], set[str]]] = {
    "simulate": (
        lambda: hespas.simulate(SHARDED, "H100-SXM", estimator="roofline"),
        {"timeline", "idle-histogram", "memory-0", "roofline", "bus-bandwidth", "communication-matrix"},
    ),
    "analyze": (
        lambda: hespas.analyze(PROFILE, baseline=PROFILE, hardware="H100-SXM"),
        {"waterfall", "timeline", "idle-histogram", "roofline", "flame-graph", "bus-bandwidth"}
        | {"communication-matrix"},
    ),
    "grid": (grid, {"heat-map", "pareto"}),
    "compare runs": (difference, {"waterfall"}),
    "plan": (
        lambda: hespas.plan(
            "llama-3-8b", devices=8, hardware="H100-SXM", global_batch=8, pp=(1, 2), cp=1, zero=1, margin=0.5
        ),
        {"heat-map", "pareto"},
    ),
    "serve": (
        lambda: hespas.serve(api.Server(model="llama-3-8b", hardware="H100-SXM"), REQUESTS),
        {"latency-distribution", "ttft-by-arrival"},
    ),
    "serve within limits": (
        lambda: hespas.plan_serving(
            "llama-3-8b",
            "closed:prompt=64,output=8,requests=8",
            hardware="H100-SXM",
            devices=1,
            sla="ttft=1s",
            max_num_seqs=8,
        ),
        {"pareto"},
    ),
    "generate": (
        lambda: hespas.generate(hespas.llm_step("llama-3-8b", tp=2, dp=2, global_batch=4)),
        {"communication-matrix"},
    ),
    "generate and simulate": (
        lambda: hespas.generate(hespas.llm_step("llama-3-8b", tp=2, dp=2, global_batch=4), system="dgx-h100"),
        {"timeline", "idle-histogram", "flame-graph", "roofline", "bus-bandwidth", "memory-0"}
        | {"communication-matrix"},
    ),
    "compare": (accuracy_difference, {"errors"}),
    "accuracy": (measured, ACCURACY | {"roofline"}),
    "accuracy of two": (
        lambda: measured(estimators=("roofline", "composite")),
        ACCURACY | {"roofline", "predicted-2", "error-distribution-2", "waterfall-2"},
    ),
    "league": (published, {"step-times", "errors", "scaling-1"}),
    "roundtrip": (
        lambda: hespas.roundtrip(FIXTURES / "stablehlo" / "mlp.mlir", formats=["op-graph", "stablehlo"]),
        set(),
    ),
    "check": (lambda: hespas.check(FIXTURES / "chakra" / "pipeline_2x2", profile="astra-sim"), set()),
}
"""Command -> its result, and the names of its charts."""


@cache
def result_of(command: str) -> Result:
    return RESULTS[command][0]()


class Anchors(HTMLParser):
    """Ids of a page, and the ids to which its links lead."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        if tag == "a":
            self.links.add((values.get("href") or "").removeprefix("#").partition("/")[0])


@pytest.mark.parametrize("command", RESULTS)
def test_the_page_has_the_charts_of_the_result(command: str) -> None:
    result, names = result_of(command), RESULTS[command][1]
    charts = {chart.name: chart for chart in result.charts()}
    assert set(charts) == names
    anchors = Anchors(result.to_html())
    assert {chart.id for chart in charts.values()} <= set(anchors.ids)
    assert len(anchors.ids) == len(set(anchors.ids))
    assert anchors.links <= set(anchors.ids)
    for name in names:
        assert result.plot(name).to_svg() == charts[name].to_svg()
    with pytest.raises(UsageError, match="no chart 'other'"):
        result.plot("other")


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("command", RESULTS)
def test_the_page_has_no_faults_in_a_browser(command: str, width: int, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(result_of(command).to_html(), encoding="utf-8")
    script = f"{FAULTS} document.title = JSON.stringify({{ faults }});"
    assert seen_by(script, page, tmp_path, width=width) == {"faults": []}
