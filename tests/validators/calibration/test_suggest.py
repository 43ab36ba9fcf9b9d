"""Suggested shapes: within the range of the models, away from measured rows, equal by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.estimators.learned.extrapolation import octaves_beyond
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import load_device
from hespas.measurements import Columns, Measurements, read_measurements
from hespas.measurements.tidy import tidy_operations
from hespas.operations import KINDS, Labels, Operations, build
from hespas.validators.calibration.known_sizes import candidates_of, known_sizes
from hespas.validators.calibration.suggest import TIME_COLUMN, Suggestions, chosen, suggest
from tests.validators.small_tables import matmul_row, write_table


def operations(done: Suggestions) -> Operations:
    return tidy_operations(Columns(Path("suggested"), done.frame))


def octaves(done: Suggestions) -> FloatArray:
    return np.log2(np.stack([operations(done).dim(name) for name in "mnk"], axis=1))


def matmuls(sizes: Sequence[tuple[int, int, int]]) -> Operations:
    m, n, k = np.array(sizes, np.float64).T
    return build.matmuls(Labels.constant("bf16", len(m)), batch=np.ones(len(m)), m=m, n=n, k=k)


def rows_of(path: Path, sizes: Sequence[tuple[int, int, int]]) -> Measurements:
    return read_measurements(write_table(path, [matmul_row("H100-SXM", size, 10.0) for size in sizes]))


@settings(max_examples=10)
@given(
    name=st.sampled_from(["H100-SXM", "MI300X", "L40S", "Arc-Pro-B60", "RTX-4090"]),
    kind=st.sampled_from(["matmul", "attention.context", "attention.generation", "moe", "vector"]),
    count=st.integers(1, 60),
    seed=st.integers(0, 5),
)
def test_shapes_are_distinct_and_within_what_models_know(name: str, kind: str, count: int, seed: int) -> None:
    device = load_device(name)
    done = suggest(device, count, kinds=[kind], seed=seed)
    assert done.frame.equals(suggest(device, count, kinds=[kind], seed=seed).frame)
    ops = operations(done)
    first, _ = ops.distinct_rows()
    assert len(first) == len(ops) == count
    assert bool(done.frame[TIME_COLUMN].isna().all())
    (known,) = known_sizes(device, [kind], [])
    beyond = np.min([octaves_beyond(model.card.reach, ops) for model in known.models], axis=0)
    assert beyond.max() <= 1
    assert np.isfinite(ops.flops).all()
    assert (ops.bytes_moved <= device.main_memory.capacity_bytes).all()
    for dim in KINDS[kind]:
        size = ops.dim(dim)
        assert (size == np.floor(size)).all()
        assert (size >= 1).all()


def test_a_few_lie_beyond_and_off_any_grid() -> None:
    device = load_device("H100-SXM")
    (known,) = known_sizes(device, ["matmul"], ["bf16"])
    ops = candidates_of(known, device, np.random.default_rng(0)).ops
    n = ops.dim("n")
    large = n[n >= 128]
    assert 0.6 < (large % 64 == 0).mean() < 0.95
    beyond = np.min([octaves_beyond(model.card.reach, ops) for model in known.models], axis=0)
    assert 0 < (beyond > 0).mean() < 0.1


def test_nothing_measured_is_suggested_again(tmp_path: Path) -> None:
    device = load_device("H100-SXM")
    first = suggest(device, 40, dtypes=["bf16"])
    path = tmp_path / "filled.csv"
    first.frame.assign(**{TIME_COLUMN: 10.0}).to_csv(path, index=False)
    table = read_measurements(path)
    again = suggest(device, 40, dtypes=["bf16"], measured=[table])
    assert again.classes[0].measured == 40
    assert again.classes[0].candidates == first.classes[0].candidates - 40
    both = [tuple(row) for each in (first, again) for row in each.frame[["batch", "m", "n", "k"]].to_numpy()]
    assert len(set(both)) == 80


def test_what_is_measured_moves_the_choice_elsewhere(tmp_path: Path) -> None:
    device = load_device("H100-SXM")
    few = (64, 128, 256)
    small = rows_of(tmp_path / "t.csv", [(m, n, k) for m in few for n in few for k in few])
    before, after = (octaves(suggest(device, 10, measured=measured)) for measured in ([], [small]))
    assert not (np.abs(after - 7).max(axis=1) <= 2).any()
    assert after.mean() > before.mean()


def test_the_choice_stands_for_all_candidates() -> None:
    device = load_device("H100-SXM")
    (known,) = known_sizes(device, ["matmul"], ["bf16"])
    few = [(32, 64, 64 + each) for each in range(10)]
    many = [(8192 + each, 8192, 8192) for each in range(90)]
    candidates = matmuls([*few, *many])
    assert chosen(device, known, candidates, 1)[0] >= 10, "one shape stands for the many"
    rows = chosen(device, known, candidates, 20)
    assert len(set(rows.tolist())) == 20
    assert 1 <= (rows < 10).sum() <= 3, "few of twenty for a tenth of them"
    after = chosen(device, known, candidates, 1, measured=[matmuls(many[:5])])
    assert after[0] < 10, "the many were measured"


def test_several_kinds_and_formats_share_the_shapes() -> None:
    done = suggest(load_device("H100-SXM"), 7, kinds=["matmul", "vector"], dtypes=["bf16", "f16"])
    assert [(each.kind, each.dtype, each.shapes) for each in done.classes] == [
        ("matmul", "bf16", 2), ("matmul", "f16", 2), ("vector", "bf16", 2), ("vector", "f16", 1),
    ]  # fmt: skip
    assert done.frame["kind"].tolist()[:4] == ["matmul", "matmul", "vector", "vector"], "in turns"
    assert set(done.frame.loc[done.frame["kind"] == "vector", "op"]) - {""}


def test_the_usual_format_is_the_fastest_of_the_device() -> None:
    formats = {name: suggest(load_device(name), 1).classes[0].dtype for name in ("H100-SXM", "T4", "TPU-v5e")}
    assert formats == {"H100-SXM": "bf16", "T4": "f16", "TPU-v5e": "bf16"}


@pytest.mark.parametrize(
    ("device", "count", "kinds", "dtypes", "message"),
    [
        ("H100-SXM", 0, [], [], "shapes to suggest: 0"),
        ("H100-SXM", 10**6, [], [], "candidates"),
        ("H100-SXM", 1, ["collective"], [], "no learned model covers sizes of kind 'collective'"),
        ("H100-SXM", 1, ["matmul"], ["f99"], "no number format 'f99'"),
        ("H100-SXM", 1, ["quantize"], ["f32"], "no learned model of quantize covers f32"),
        ("TPU-v4", 1, ["moe"], [], "no learned model of moe covers a tpu"),
    ],
)
def test_what_models_do_not_know_is_refused(
    device: str, count: int, kinds: list[str], dtypes: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        suggest(load_device(device), count, kinds=kinds, dtypes=dtypes)
    assert caught.value.hint


def test_a_format_without_a_rate_is_refused() -> None:
    device = load_device("H100-SXM")
    poor = replace(device, peaks=tuple(each for each in device.peaks if each.dtype == "i8"))
    with pytest.raises(UsageError, match="has no rate of matmul in bf16"):
        suggest(poor, 1, dtypes=["bf16"])


def test_a_table_of_another_device_is_refused(tmp_path: Path) -> None:
    table = rows_of(tmp_path / "t.csv", [(64, 64, 64)])
    with pytest.raises(UsageError, match=r"no row of t\.csv is of L4"):
        suggest(load_device("L4"), 1, measured=[table])
