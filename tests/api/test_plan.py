"""Layout search: the best layout is correct, its figures equal a generated step, and bounds hold."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

import hespas
from hespas.api import device_energy
from hespas.api.plan_bounds import LayoutBounds
from hespas.api.simulation_job import StepJob
from hespas.api.systems import sized_for
from hespas.generators.llm import LlmStep
from hespas.generators.llm.model import model_parameters
from hespas.generators.llm.space import Candidate, LayoutSpace
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.hardware import StepFactor, load_device, write_device
from hespas.report.charts import Plot

ROOT = Path(__file__).parents[2]
_DENSE = (
    'name = "dense"\nhidden = 2048\nlayers = 8\nvocab = 32000\nheads = 16\nkv_heads = 8\nffn = 8192\n'
    "gated = true\n"
)
_EXPERTS = _DENSE.replace("dense", "experts") + "experts = 8\ntopk = 2\n"
_SEQ = 2048


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, text in (("dense", _DENSE), ("experts", _EXPERTS)):
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return {name: str(folder / f"{name}.toml") for name in ("dense", "experts")}


def _step(model: str, batch: int, **settings: Any) -> LlmStep:
    step = hespas.llm_step(model, seq=_SEQ, global_batch=batch, **settings)
    assert isinstance(step, LlmStep)
    return step


def _figures(
    model: str, batch: int, settings: Mapping[str, Any], system: str
) -> tuple[float, float, float, float]:
    """Return the step time, the peak memory, the device memory and the energy of ``hespas generate``."""
    done = hespas.generate(_step(model, batch, **settings), hardware="H100-SXM", system=system)
    assert done.step is not None
    energy = device_energy(done.step, "H100-SXM")
    assert energy is not None
    return (
        done.step.step_ns,
        done.account.peak_memory_bytes,
        done.account.device_memory_bytes,
        energy.energy_j,
    )


@pytest.mark.parametrize(("name", "devices", "batch"), [("dense", 16, 16), ("experts", 16, 32)])
def test_rows_are_figures_of_generated_steps(
    models: dict[str, str], name: str, devices: int, batch: int
) -> None:
    done = hespas.plan(
        models[name],
        devices=devices,
        hardware="H100-SXM",
        system="dgx-h100",
        seq=_SEQ,
        global_batch=batch,
        pp=(1, 2, 4),
        cp=1,
        ep=1 if name == "dense" else 4,
        micro_batch=2,
        top=4,
    )
    assert len(done.rows) >= 4
    for row in done.rows[:4]:
        step_ns, memory_bytes, device_memory_bytes, energy_j = _figures(
            models[name], batch, row.settings, "dgx-h100"
        )
        assert row.energy_j == pytest.approx(row.devices * energy_j, rel=1e-9)
        assert row.step_ns == pytest.approx(step_ns, rel=1e-9)
        assert row.peak_memory_bytes == memory_bytes
        assert row.device_memory_bytes == device_memory_bytes > memory_bytes
        parts_ns = row.compute_ns + row.exposed_comm_ns + row.bubble_ns
        assert parts_ns == pytest.approx(row.step_ns, rel=0.01)


_ODD_SPACES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"framework": "megatron", "gradient_precision": "16bit"},
     {"tp": 1, "pp": 2, "cp": 2, "zero": (1, 3), "recompute": "core_attn", "offload": ("none", "block")}),
    ("dense", {"framework": "torchtitan", "gradient_precision": "16bit"},
     {"tp": (1, 2), "pp": 1, "cp": 2, "zero": (2, 3), "recompute": "full", "offload": "none"}),
    ("dense", {"framework": "torchtitan"},
     {"tp": 1, "pp": 2, "cp": 2, "zero": 3, "recompute": ("none", "full"), "offload": "optimizer"}),
    ("experts", {"framework": "megatron", "gradient_precision": "16bit"},
     {"tp": 1, "pp": 1, "cp": 2, "ep": (2, 4), "etp": 1, "zero": (1, 3), "recompute": "none",
      "offload": ("none", "optimizer")}),
    ("experts", {"framework": "torchtitan", "gradient_precision": "16bit"},
     {"tp": 2, "pp": 2, "cp": 1, "ep": 2, "etp": (1, 2), "zero": (0, 3), "recompute": "none",
      "offload": "core_attn"}),
    ("experts", {"framework": "maxtext"},
     {"tp": 1, "pp": 1, "cp": 2, "ep": 2, "etp": 1, "zero": (2, 3), "recompute": ("none", "moe"),
      "offload": "none"}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(_ODD_SPACES)))
def test_every_row_of_a_small_space_is_a_generated_step(models: dict[str, str], number: int) -> None:
    name, shared, axes = _ODD_SPACES[number]
    done = hespas.plan(
        models[name], devices=8, hardware="H100-SXM", system="dgx-h100", seq=_SEQ, global_batch=16,
        micro_batch=2, schedule="1f1b", vp=1, top=8, margin=0, **shared, **axes,
    )  # fmt: skip
    assert done.proof.layouts == len(done.rows) > 1
    for row in done.rows:
        step_ns, memory_bytes, device_memory_bytes, energy_j = _figures(
            models[name], 16, {**shared, **row.settings}, "dgx-h100"
        )
        assert row.energy_j == pytest.approx(row.devices * energy_j, rel=1e-9)
        assert row.step_ns == pytest.approx(step_ns, rel=1e-9)
        assert row.peak_memory_bytes == memory_bytes
        assert row.device_memory_bytes == device_memory_bytes


def test_gradients_of_16_bits_need_less_time_and_memory(models: dict[str, str]) -> None:
    arguments: dict[str, Any] = {
        "devices": 8, "hardware": "H100-SXM", "system": "dgx-h100", "seq": _SEQ, "global_batch": 8, "tp": 1,
        "pp": 1, "cp": 1, "zero": 0, "micro_batch": 1, "recompute": "none",
    }  # fmt: skip
    wide = hespas.plan(models["dense"], **arguments).best
    narrow = hespas.plan(models["dense"], gradient_precision="16bit", **arguments).best
    assert wide is not None
    assert narrow is not None
    parameters = model_parameters(_step(models["dense"], 8).model)
    assert wide.peak_memory_bytes - narrow.peak_memory_bytes == 2 * parameters
    assert narrow.exposed_comm_ns < wide.exposed_comm_ns
    with pytest.raises(UsageError, match="activations have 32 bits"):
        hespas.plan(models["dense"], precision="f32", gradient_precision="16bit", **arguments)


_SPACES: list[tuple[str, int, int, dict[str, Any]]] = [
    (name, devices, batch, axes)
    for (name, devices, batch), axes in product(
        [("dense", 4, 8), ("dense", 8, 16), ("experts", 8, 8), ("experts", 16, 32)],
        [
            {"pp": 1, "cp": 1, "micro_batch": 1, "zero": 1, "recompute": "none", "ep": 1},
            {"tp": 1, "cp": 1, "micro_batch": 1, "zero": 1, "recompute": "none", "ep": 1, "pp": (2, 4)},
            {"tp": 2, "pp": 2, "vp": (1, 2), "micro_batch": 1, "recompute": ("none", "full"), "zero": 1,
             "ep": 1, "cp": 1},
            {"tp": 1, "pp": 1, "cp": (1, 2), "zero": (0, 1, 2, 3), "micro_batch": 1, "recompute": "none",
             "ep": 1},
            {"tp": (1, 2), "pp": (1, 2), "cp": 1, "ep": (1, 2), "etp": 1, "vp": 1, "micro_batch": 1,
             "zero": (1, 3), "recompute": "none", "schedule": "1f1b"},
        ],
    )
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(_SPACES)))
def test_the_best_of_a_small_space_is_proven(models: dict[str, str], number: int) -> None:
    name, devices, batch, axes = _SPACES[number]
    done = hespas.plan(
        models[name], devices=devices, hardware="H100-SXM", system="dgx-h100", seq=_SEQ, global_batch=batch,
        margin=0, top=1, **axes,
    )  # fmt: skip
    step = _step(models[name], batch)
    listed = {key: [value] if isinstance(value, int | str) else list(value) for key, value in axes.items()}
    space = LayoutSpace(
        model=step.model, devices=devices, layout=step.layout, training=step.training, axes=listed
    )
    times_ns = [
        _figures(models[name], batch, candidate.by_name(), "dgx-h100")[0] for candidate in space.candidates()
    ]
    assert done.best is not None
    assert done.best.step_ns == pytest.approx(min(times_ns), rel=1e-9)
    proof = done.proof
    assert proof.layouts == len(times_ns)
    assert proof.beyond_memory + proof.beyond_price + proof.bounded + proof.simulated == proof.layouts
    assert sum(time_ns < proof.limit for time_ns in times_ns) == 0


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_bounds_are_not_above_the_engine(models: dict[str, str], name: str) -> None:
    devices, batch = 32, 64
    step = _step(models[name], batch)
    space = LayoutSpace(
        model=step.model,
        devices=devices,
        layout=step.layout,
        training=step.training,
        axes={"offload": ("", "optimizer")},
    )
    candidates: list[Candidate] = random.Random(7).sample(list(space.candidates()), 20)
    system = sized_for("dgx-h100", devices)
    job = StepJob("H100-SXM", "auto", None, "warn", Diagnostics(), None, system)
    bounds = LayoutBounds(job, step, devices, load_device("H100-SXM"))
    for candidate in candidates:
        bounds.register(candidate)
    ratios: list[float] = []
    for candidate in candidates:
        bound = bounds.bound(candidate)
        assert bounds.bound(candidate, recomputes=False).step_ns <= bound.step_ns * 1.01
        chosen = replace(step, layout=candidate.layout, training=candidate.training)
        done = job.run(chosen.workload(), None)
        assert bound.step_ns <= done.step_ns, candidate.by_name()
        ratios.append(bound.step_ns / done.step_ns)
    assert sorted(ratios)[len(ratios) // 2] > 0.75  # a bound of 0 would prove nothing


def test_memory_is_a_gate(models: dict[str, str], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"devices": 8, "seq": _SEQ, "global_batch": 32, "pp": 1, "cp": 1}
    free = hespas.plan(models["dense"], hardware="H100-SXM", **arguments)
    assert free.best is not None
    device = load_device("H100-SXM")
    most = int(free.best.device_memory_bytes) - 1
    memories = tuple(
        structs.replace(memory, capacity_bytes=most) if memory == device.main_memory else memory
        for memory in device.memories
    )
    small = write_device(replace(device, name="H100-SXM", memories=memories), tmp_path / "small.toml")
    done = hespas.plan(models["dense"], hardware=str(small), **arguments)
    assert done.proof.beyond_memory > 0
    assert all(row.device_memory_bytes <= most for row in done.rows)
    (layouts, frontier) = cast("Plot", done.plot("pareto")).series
    assert max(*layouts.x, *frontier.x) <= most
    assert [*layouts.x] == [row.device_memory_bytes for row in done.rows]
    arguments |= {"tp": 1, "zero": 0, "micro_batch": 4, "recompute": "none"}
    none = hespas.plan(models["dense"], hardware=str(small), **arguments)
    assert none.rows == ()
    assert "none of" in repr(none)
    assert json.loads(none.to_json())["proof"]["simulated"] == 0


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_step_factors_scale_steps_and_bounds(models: dict[str, str], tmp_path: Path, ratio: float) -> None:
    arguments: dict[str, Any] = {"devices": 8, "seq": _SEQ, "global_batch": 32, "pp": 1, "cp": 1}
    plain = hespas.plan(models["dense"], hardware="H100-SXM", **arguments)
    factor = StepFactor(
        framework="megatron",
        phase="training",
        estimator="auto",
        factor=ratio,
        std_error=0.03,
        share=1.0,
        ratio=ratio,
        rows=9,
        workloads=9,
        table="steps.csv",
        fitted="2026-01-31",
    )
    device = replace(load_device("H100-SXM"), step_factors=(factor,))
    own = write_device(device, tmp_path / "own.toml")
    done = hespas.plan(models["dense"], hardware=str(own), **arguments)
    assert plain.best is not None
    assert done.best is not None
    assert done.best.settings == plain.best.settings
    assert done.best.step_ns == pytest.approx(ratio * plain.best.step_ns)
    parts_ns = done.best.compute_ns + done.best.exposed_comm_ns + done.best.bubble_ns
    assert parts_ns == pytest.approx(done.best.step_ns, rel=0.01)
    step = _step(models["dense"], 32, **done.best.settings)
    assert hespas.generate(step, hardware=str(own)).to_dict()["step"]["step_ns"] == pytest.approx(
        done.best.step_ns, rel=1e-9
    )


def _prices(folder: Path, *rows: str) -> Path:
    path = folder / "prices.toml"
    path.write_text("\n".join(['currency = "EUR"', *rows]), encoding="utf-8")
    return path


def test_price_and_energy_follow_the_file(models: dict[str, str], tmp_path: Path) -> None:
    path = _prices(
        tmp_path, "[[device]]", 'name = "H100-SXM"', "price_per_hour = 3.0", "tdp_w = 1000.0",
        "[device.power]", "compute = [1.0, 1.0, 1.0]", "memory = [1.0, 1.0, 1.0]", "idle = [1.0, 1.0, 1.0]",
    )  # fmt: skip
    done = hespas.plan(
        models["dense"], devices=8, hardware="H100-SXM", seq=_SEQ, global_batch=8, prices=path,
        objective="price", tp=(1, 2), pp=1, cp=1, zero=1, micro_batch=1,
    )  # fmt: skip
    best = done.best
    assert best is not None
    hours = best.step_ns / 3.6e12
    assert best.price_per_million_tokens == pytest.approx(hours * 8 * 3.0 / (8 * _SEQ) * 1e6)
    assert best.energy_j == pytest.approx(8 * 1000.0 * best.step_ns / 1e9, rel=0.01)
    assert best.energy_low_j == pytest.approx(best.energy_j * best.step_low_ns / best.step_ns)
    assert best.energy_high_j == pytest.approx(best.energy_j * best.step_high_ns / best.step_ns)
    assert "EUR" in repr(done)
    limit = best.price_per_million_tokens / 2
    none = hespas.plan(
        models["dense"], devices=8, hardware="H100-SXM", seq=_SEQ, global_batch=8, prices=path,
        max_price=limit, tp=(1, 2), pp=1, cp=1, zero=1, micro_batch=1,
    )  # fmt: skip
    assert none.rows == ()
    assert none.proof.beyond_price == none.proof.layouts


def test_energy_is_an_interval_without_a_file(models: dict[str, str]) -> None:
    done = hespas.plan(
        models["dense"], devices=8, hardware="H100-SXM", seq=_SEQ, global_batch=8, objective="energy",
        pp=1, cp=1, micro_batch=1,
    )  # fmt: skip
    best = done.best
    assert best is not None
    assert 0 < best.energy_low_j < best.energy_j <= 8 * 700 * best.step_ns / 1e9
    assert best.energy_j * best.step_high_ns / best.step_ns < best.energy_high_j
    assert best.price_per_million_tokens != best.price_per_million_tokens
    assert any("assumed" in text for text in done.sources)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (["[[device]]", 'name = "nothing"'], UsageError),
        (["[[device]]", 'name = "H100-SXM"'] * 2, UsageError),
        (["[[device]]", 'name = "H100-SXM"', "price_per_hour = -1.0"], FormatError),
        (["[[device]]", 'name = "H100-SXM"', "[device.power]", "idle = [0.9, 0.5, 0.1]"], FormatError),
        (["[[device]]", 'name = "H100-SXM"', "[device.power]", "idle = [0.9, 0.95, 1.0]"], FormatError),
    ],
)
def test_malformed_price_files_are_refused(
    models: dict[str, str], tmp_path: Path, rows: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        hespas.plan(
            models["dense"], devices=8, hardware="H100-SXM", global_batch=8, prices=_prices(tmp_path, *rows)
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware": "nothing"},
        {"hardware": None},
        {"devices": 0},
        {"global_batch": 0},
        {"max_price": 1.0},
        {"objective": "price"},
        {"tp": 3},
        {"recompute": "nothing"},
        {"recompute": "moe"},
        {"schedule": "nothing", "pp": 2},
        {"offload": "nothing"},
        {"link_bandwidth": 0.0},
        {"source": "traces"},
        {"devices": []},
        {"hardware": []},
        {"link_bandwidth": []},
        {"schedule": []},
        {"margin": float("nan")},
        {"zero": 4},
        {"hardware": "TPU-v7x", "objective": "energy"},
        *(
            {axis: value}
            for axis in ("dp", "tp", "pp", "vp", "cp", "ep", "etp", "micro_batch")
            for value in (0, -1, [], [1, 0])
        ),
    ],
)
def test_wrong_arguments_are_refused(models: dict[str, str], changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"devices": 8, "hardware": "H100-SXM", "global_batch": 8}
    with pytest.raises(UsageError):
        hespas.plan(models["dense"], **arguments | changes)


def test_clusters_are_compared(models: dict[str, str]) -> None:
    done = hespas.plan(
        models["dense"], devices=(4, 8), hardware=("H100-SXM", "B200-SXM"), link_bandwidth=(1.0, 2.0),
        seq=_SEQ, global_batch=8, tp=(1, 2), pp=1, cp=1, zero=1, micro_batch=1, recompute="none",
        top=16, margin=1.0,
    )  # fmt: skip
    clusters = {(row.hardware, row.devices, row.link_bandwidth) for row in done.rows}
    assert len(clusters) == 8
    assert done.best is not None
    assert done.best.hardware == "B200-SXM"
    assert done.best.devices == 8
    assert {done.reason(row) for row in done.rows} > {"", "another cluster"}
    frame = done.to_pandas()
    assert len(frame) == len(done.rows)
    assert done.plot("pareto").name == "pareto"


def test_a_program_determines_its_model(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "devices": 4,
        "hardware": "H100-SXM",
        "seq": 128,
        "global_batch": 16,
        "top": 3,
        "pp": 1,
    }
    sink = Diagnostics()
    program = ROOT / "fixtures" / "stablehlo" / "llama_train_1dev.mlir.gz"
    done = hespas.plan(source=program, diagnostics=sink, **arguments)
    sizes = "hidden = 256\nlayers = 2\nvocab = 1024\nheads = 8\nffn = 1024\n"
    model = tmp_path / "llama.toml"
    model.write_text(f'name = "llama"\n{sizes}', encoding="utf-8")
    named = hespas.plan(str(model), **arguments)
    assert [(row.settings, row.step_ns) for row in done.rows] == [
        (row.settings, row.step_ns) for row in named.rows
    ]
    [finding] = [entry for entry in sink if entry.code == "plan.recognised-model"]
    assert "2 layers of 256, 8 heads of 32 with 8 key heads, gated MLP of 1,024" in finding.message
    settings: dict[str, Any] = {**arguments, "devices": 2, "seq": 0, "global_batch": 0}
    own = hespas.plan(source=program, **settings)
    settings |= {"seq": 128, "global_batch": 2}
    named = hespas.plan(str(model), **settings)
    assert [row.step_ns for row in own.rows] == [row.step_ns for row in named.rows]
    optimized = ROOT / "fixtures" / "hlo" / "llama_train_1dev.hlo.txt.gz"
    assert hespas.plan(source=optimized, **arguments).rows[0].settings == done.rows[0].settings
    settings |= {"seq": 4096, "global_batch": 0}
    with pytest.raises(UsageError, match="256 tokens per step are not whole sequences"):
        hespas.plan(source=program, **settings)
    with pytest.raises(UnsupportedError, match="no dense decoder has exactly its matmuls"):
        hespas.plan(source=ROOT / "fixtures" / "stablehlo" / "mlp_train.mlir", **arguments)
    with pytest.raises(UnsupportedError, match="a program of 8 devices"):
        hespas.plan(source=program.with_name("llama_fsdp_tp_local_N8.mlir.gz"), **arguments)


def test_a_generated_workload_states_its_model() -> None:
    step = hespas.llm_step("llama-3-8b", tp=8, seq=4096, global_batch=8)
    workload = hespas.generate(step).workload
    arguments: dict[str, Any] = {
        "devices": 8, "hardware": "H100-SXM", "tp": 8, "recompute": "none", "micro_batch": 1, "zero": 1
    }  # fmt: skip
    done = hespas.plan(source=workload, **arguments)
    named = hespas.plan("llama-3-8b", global_batch=8, **arguments)
    assert done.best is not None
    assert named.best is not None
    assert done.best.settings == named.best.settings
    assert done.best.step_ns == named.best.step_ns
    with pytest.raises(UsageError, match="whole sequences"):
        hespas.plan(source=workload, seq=4095, **arguments)
    with pytest.raises(UnsupportedError, match="a program of 8 devices"):
        hespas.plan(source=replace(workload, metadata={}), **arguments)
    with pytest.raises(UnsupportedError, match="no built-in model"):
        hespas.plan(source=replace(workload, name="mine"), **arguments)
    with pytest.raises(UnsupportedError, match="FLOPs per token"):  # renamed files
        hespas.plan(source=replace(workload, name="llama-3-70b"), **arguments)
    with pytest.raises(UnsupportedError, match="FLOPs per token"):
        hespas.plan(source=workload, seq=8192, **arguments)
    with pytest.raises(UsageError, match="matmuls in bf16"):
        hespas.plan(source=workload, precision="f32", **arguments)
    with pytest.raises(UsageError, match="not both"):
        hespas.plan("llama-3-8b", source=workload, **arguments)


def test_lower_bounds_rank_after_complete_steps(models: dict[str, str]) -> None:
    arguments: dict[str, Any] = {
        "devices": 4, "hardware": "H100-SXM", "seq": _SEQ, "global_batch": 8, "tp": 1, "pp": 1, "cp": 1,
        "micro_batch": 1, "recompute": "none", "zero": (1, 3), "link_bandwidth": 1000.0,
    }  # fmt: skip
    done = hespas.plan(models["dense"], offload=("none", "optimizer"), **arguments)
    complete = hespas.plan(models["dense"], **arguments)
    flags = [row.is_lower_bound for row in done.rows]
    assert flags == sorted(flags)
    assert set(flags) == {False, True}
    assert done.best is not None
    assert complete.best is not None
    assert done.best.step_ns == complete.best.step_ns > min(row.step_ns for row in done.rows)
    assert "cpu_adam" in done.rows[-1].lower_bound_reason
    assert "cpu_adam" in done.proof_text()
    assert "estimate.missing" not in done.diagnostics.counts()  # findings are those of the best step
    assert done.best.basis in next(iter(done.to_pandas()["basis"]))
    only = hespas.plan(models["dense"], offload="optimizer", **arguments)
    assert only.best is not None
    assert only.best.is_lower_bound
    assert "estimate.missing" in only.diagnostics.counts()
    assert only.proof.simulated + only.proof.bounded == only.proof.layouts


def test_counts_of_the_proof_sum_to_the_layouts(models: dict[str, str], tmp_path: Path) -> None:
    path = _prices(tmp_path, "[[device]]", 'name = "H100-SXM"', "price_per_hour = 3.0")
    arguments: dict[str, Any] = {
        "devices": 8, "hardware": "H100-SXM", "seq": _SEQ, "global_batch": 8, "tp": (1, 2, 4), "pp": 1,
        "cp": 1, "zero": 1, "micro_batch": 1, "prices": path,
    }  # fmt: skip
    free = hespas.plan(models["dense"], top=9, **arguments)
    prices = sorted(row.price_per_million_tokens for row in free.rows)
    for limit in (prices[0] * 0.999, prices[0], prices[-1], prices[0] * 0.5):
        proof = hespas.plan(models["dense"], max_price=limit, **arguments).proof
        parts = proof.beyond_memory, proof.beyond_price, proof.bounded, proof.simulated
        assert sum(parts) == proof.layouts == 9


def test_own_device_files_have_prices_and_unknown_memory(models: dict[str, str], tmp_path: Path) -> None:
    device = load_device("H100-SXM")
    memories = tuple(
        structs.replace(memory, capacity_bytes=-1) if memory == device.main_memory else memory
        for memory in device.memories
    )
    own = write_device(replace(device, name="my-chip", memories=memories), tmp_path / "chip.toml")
    path = _prices(tmp_path, "[[device]]", 'name = "my-chip"', "price_per_hour = 3.0")
    done = hespas.plan(
        models["dense"], devices=2, hardware=(str(own), str(own)), seq=_SEQ, global_batch=8, prices=path,
        objective="price", tp=(1, 1), pp=1, cp=1, zero=1, micro_batch=1, recompute="none",
    )  # fmt: skip
    assert done.best is not None
    assert done.best.price_per_million_tokens > 0
    assert done.proof.layouts == 1  # repeated values are one
    assert done.diagnostics.counts()["plan.memory-unknown"] == 1
    assert "not checked" in done.proof_text()
    wrong = _prices(tmp_path, "[[device]]", 'name = "other-chip"')
    with pytest.raises(UsageError) as caught:
        hespas.plan(models["dense"], devices=2, hardware=str(own), global_batch=8, prices=wrong)
    assert caught.value.position == "device[0].name"


def test_an_empty_space_names_the_broken_rule(models: dict[str, str]) -> None:
    arguments: dict[str, Any] = {"devices": 8, "hardware": "H100-SXM"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"global_batch": 8, "tp": 99, "pp": 1, "cp": 1}, "tp x cp x pp = 99 does not divide"),
        ({"global_batch": 8, "dp": 4, "tp": 1, "pp": 1, "cp": 1}, "leaves dp = 8"),
        ({"global_batch": 9, "tp": 1, "pp": 1, "cp": 1}, "does not divide a batch of 9"),
        ({"global_batch": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 3}, "ep x etp = 3"),
    ]
    for changes, text in cases:
        with pytest.raises(UsageError, match=text):
            hespas.plan(models["dense"], **(arguments | changes))
