"""Shipped models: complete, small, and as accurate on new shapes as their cards state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.interface import OperationModel
from hespas.estimators.learned import Learned
from hespas.estimators.learned.serialization import Card, cards_in, load_model, shipped_folder
from hespas.estimators.rates import peak_times
from hespas.graph import Diagnostics
from hespas.hardware import device_names, load_device
from hespas.measurements import read_measurements
from hespas.operations import Labels, build

_TABLES = Path(__file__).parents[3].parent / "shared" / "data" / "groundtruth"
_CARDS = cards_in(shipped_folder())
_MOST_BYTES = 6 << 20


def _mean_error(card: Card) -> float:
    rows = [row for row in card.errors if row.mape is not None]
    return sum((row.mape or 0.0) * row.n for row in rows) / sum(row.n for row in rows)


def test_the_models_are_small() -> None:
    assert sum(path.stat().st_size for path in shipped_folder().iterdir()) <= _MOST_BYTES


@pytest.mark.parametrize("path", [path for path, _ in _CARDS], ids=[card.name for _, card in _CARDS])
def test_each_card_has_its_trees_and_its_errors(path: Path) -> None:
    model = load_model(path)
    assert model.card.name == path.stem
    assert model.card.training.split == "calib"
    assert sum(each.chosen for each in model.card.selection) == 1
    assert model.card.errors
    assert {each.name for each in model.card.devices} <= set(device_names())
    assert {name for cell in model.card.cells for name in cell.rows} == {
        each.name for each in model.card.devices
    }


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("gemm-bf16", 0.05),
        ("gemm-fp8", 0.037),
        ("attention-context", 0.033),
        ("attention-generation", 0.07),
        ("vector-f32", 0.02),
        ("gemm-tpu", 0.05),
    ],
)
def test_cards_meet_the_targets_on_unseen_shapes(name: str, most: float) -> None:
    assert _mean_error({card.name: card for _, card in _CARDS}[name]) <= most


def test_the_registry_knows_it_and_devices_not_measured_get_an_answer() -> None:
    assert load_estimator("learned").name == "learned"
    model: OperationModel = Learned()
    sizes = np.array([512.0, 4096.0])
    ops = build.matmuls(Labels.constant("bf16", 2), batch=np.ones(2), m=sizes, n=sizes, k=sizes)
    diagnostics = Diagnostics()
    for name, unseen in (("H100-SXM", False), ("H100-PCIe", True)):
        device = load_device(name)
        said = model.predict(ops, device, diagnostics)
        assert (said.duration_ns > peak_times(ops, device).roofline_ns).all()
        assert (said.low_ns < said.duration_ns).all()
        assert (said.high_ns > said.duration_ns).all()
        assert ("learned.unseen-device" in {each.code for each in diagnostics}) is unseen


@pytest.mark.parametrize(
    ("device", "variant", "most_ns"),
    [("H100-SXM", "", 5e3), ("H100-SXM", "pytorch events", 50e3), ("T4", "", 50e3)],
    ids=["kernel-of-another-device", "events-of-another-device", "measured-device"],
)
def test_another_hosts_launches_are_no_kernel_times(device: str, variant: str, most_ns: float) -> None:
    """A small addition takes 1.5 us on an H100; timed with events on other devices, 15 to 40 us."""
    ops = build.elementwise(
        "vector",
        Labels.constant("f32", 1),
        op=Labels.constant("add", 1),
        rows=np.array([8.0]),
        columns=np.array([4096.0]),
        flops_per_element=np.ones(1),
        passes=np.array([3.0]),
        variant=Labels.constant(variant, 1),
    )
    found = Diagnostics()
    said = Learned().predict(ops, load_device(device), found)
    assert 1e3 < said.duration_ns[0] < most_ns
    assert bool(variant) or any("from events" in each.message for each in found)


@pytest.mark.skipif(not _TABLES.is_dir(), reason="the measured tables are not here")
def test_what_the_card_says_is_what_the_table_says() -> None:
    table = read_measurements(_TABLES / "aiconfigurator_gemm.parquet", split="devval", hardware="H200-SXM")
    table = table.take(table.ops.scheme.where("bf16"))
    said = Learned().predict(table.ops, load_device("H200-SXM"))
    card = {card.name: card for _, card in _CARDS}["gemm-bf16"]
    row = next(each for each in card.errors if each.hardware == "H200-SXM")
    error = np.abs(said.duration_ns / table.duration_ns - 1)
    assert row.n == len(table)
    assert float(error.mean()) == pytest.approx(row.mape, abs=1e-5)
    inside = (said.low_ns <= table.duration_ns) & (table.duration_ns <= said.high_ns)
    assert float(inside.mean()) == pytest.approx(row.interval_coverage, abs=1e-5)
