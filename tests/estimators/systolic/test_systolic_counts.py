"""Cycles, utilisation and accesses against runs of scalesim 3.0.0 and against sums written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.estimators.systolic import (
    Array,
    Backing,
    fold_counts,
    fold_cycles,
    shared_cycles,
    stall_cycles,
)
from hespas.estimators.systolic.cycles import parse_array, parse_dataflow
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.operations.build import convolution_product

ORACLE = Path(__file__).parents[3].parent / "shared" / "data" / "systolic_oracle.csv"
FLOWS = ("os", "ws", "is")


def column(*values: float) -> FloatArray:
    return np.array(values, np.float64)


def array(text: str, flow: str) -> Array:
    rows, columns = parse_array(text)
    return Array(rows, columns, parse_dataflow(flow))


def oracle() -> pd.DataFrame:
    if not ORACLE.exists():
        pytest.skip("the runs of the simulator are not beside the checkout")
    return pd.read_csv(ORACLE)


def test_every_run_of_the_simulator_is_exact() -> None:
    runs = oracle()
    checked = 0
    for index in range(len(runs)):
        run = runs.iloc[index]
        shape = array(f"{run['rows']}x{run['cols']}", str(run["dataflow"]))
        m, n, k = (column(float(run[name])) for name in ("M", "N", "K"))
        found = fold_counts(m, n, k, shape)
        label = f"row {index}"
        assert found.cycles[0] == run["total_cycles"] - run["stall_cycles"], label
        assert fold_cycles(m, n, k, shape)[0] == found.cycles[0], label
        assert found.ifmap_reads[0] == run["sram_ifmap_reads"], label
        assert found.filter_reads[0] == run["sram_filter_reads"], label
        assert found.ofmap_writes[0] == run["sram_ofmap_writes"], label
        # The simulator sums over folds in floating point: all but its last digits.
        with_stalls = found.overall_pct[0] * found.cycles[0] / run["total_cycles"]
        assert with_stalls == pytest.approx(run["overall_util_pct"], rel=1e-13), label
        assert found.mapping_pct[0] == pytest.approx(run["mapping_eff_pct"], rel=1e-13), label
        assert found.compute_pct[0] == pytest.approx(run["compute_util_pct"], rel=1e-13), label
        checked += 1
    assert checked == 303


def test_stalls_are_roughly_those_of_the_simulator() -> None:
    runs = oracle()
    limited = runs[runs["mode"] == "USER"]
    right = 0
    for index in range(len(limited)):
        run = limited.iloc[index]
        shape = array(f"{run['rows']}x{run['cols']}", str(run["dataflow"]))
        backing = Backing(float(run["bw_words_per_cycle"]), float(run["sram_kb"]) * 1024)
        m, n, k = (column(float(run[name])) for name in ("M", "N", "K"))
        right += bool(stall_cycles(m, n, k, shape, backing)[0] > 0) == bool(run["stall_cycles"] > 0)
    assert len(limited) == 69
    assert right / len(limited) > 0.7


@pytest.mark.parametrize(("size", "cycles"), [(512, 14_303), (1024, 89_983)])
def test_published_totals(size: float, cycles: int) -> None:
    one = column(size)
    assert fold_cycles(one, one, one, array("128x128", "ws"))[0] == cycles


def test_one_fold_by_hand() -> None:
    """A 3x2 by 2x4 product in a 4x4 array: one fold, whatever stays."""
    m, n, k = column(3), column(4), column(2)
    os = fold_counts(m, n, k, array("4x4", "os"))
    assert (os.cycles[0], os.folds[0]) == (2 + 4 + 4 - 2 - 1, 1)
    assert os.mapping_pct[0] == pytest.approx(100 * 12 / 16)
    assert os.overall_pct[0] == pytest.approx(100 * 24 / (7 * 16))
    assert (os.ifmap_reads[0], os.filter_reads[0], os.ofmap_writes[0]) == (6, 8, 12 + 8)
    ws = fold_counts(m, n, k, array("4x4", "ws"))
    assert ws.cycles[0] == 3 + 8 + 4 - 2 - 1
    assert (ws.ifmap_reads[0], ws.filter_reads[0], ws.ofmap_writes[0]) == (6, 8, 12)
    inputs = fold_counts(m, n, k, array("4x4", "is"))
    assert inputs.cycles[0] == 4 + 8 + 4 - 2 - 1
    assert (inputs.ifmap_reads[0], inputs.filter_reads[0], inputs.ofmap_writes[0]) == (6, 8, 12)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_batch_multiplies_folds_and_is_not_more_rows(flow: str) -> None:
    shape = array("16x8", flow)
    m, n, k, batch = column(20), column(30), column(40), column(6)
    one, six = fold_counts(m, n, k, shape), fold_counts(m, n, k, shape, batch=batch)
    assert six.cycles[0] == 6 * (one.cycles[0] + 1) - 1
    assert six.folds[0] == 6 * one.folds[0]
    assert six.ifmap_reads[0] == 6 * one.ifmap_reads[0]
    assert six.ofmap_writes[0] == 6 * one.ofmap_writes[0]
    assert six.mapping_pct[0] == one.mapping_pct[0]
    assert six.cycles[0] != fold_counts(6 * m, n, k, shape).cycles[0]


def test_unknown_and_empty_sizes() -> None:
    found = fold_counts(column(np.nan, 0), column(4, 4), column(4, 4), array("4x4", "ws"))
    assert np.isnan(found.cycles[0])
    assert found.cycles[1] == 0
    assert np.isnan(found.overall_pct).all()


def test_many_shapes_are_counted_like_each_alone() -> None:
    """Columns are worked through in blocks: nothing depends on where one begins."""
    rng = np.random.default_rng(7)
    m, n, k = (rng.integers(1, 900, 40_000).astype(np.float64) for _ in range(3))
    whole = fold_counts(m, n, k, array("32x8", "is"))
    for place in (0, 16_383, 16_384, 32_768, 39_999):
        one = slice(place, place + 1)
        alone = fold_counts(m[one], n[one], k[one], array("32x8", "is"))
        assert whole.cycles[place] == alone.cycles[0]
        assert whole.compute_pct[place] == alone.compute_pct[0]
    assert len(fold_counts(column(), column(), column(), array("4x4", "os")).cycles) == 0
    with pytest.raises(UsageError, match="different shapes: "):
        fold_counts(m, n[:5], k, array("4x4", "os"))


SIZE = st.integers(1, 500)


@given(SIZE, SIZE, SIZE, st.sampled_from(FLOWS), st.sampled_from([1, 2, 3, 8, 12]))
def test_more_arrays_are_never_slower(m: int, n: int, k: int, flow: str, arrays: int) -> None:
    shape = array("16x16", flow)
    sizes = (column(m), column(n), column(k))
    one = shared_cycles(*sizes, shape)[0]
    several = shared_cycles(*sizes, shape, arrays=arrays)[0]
    assert one == fold_cycles(*sizes, shape)[0]
    assert several <= one
    assert (several + 1) * arrays >= (one + 1) / 16  # no array is emptier than one row or column of cells


def test_arrays_share_n_m_or_the_batch() -> None:
    ws = array("128x128", "ws")
    per = 256 + 3 * 128 - 2
    # Two arrays halve N = 256: one fold of each instead of two. M = 256 halved would save 128 of 2 x per.
    assert shared_cycles(column(256), column(256), column(128), ws, arrays=2)[0] == per - 1
    # One fold only: M is what can be shared.
    assert shared_cycles(column(256), column(128), column(128), ws, arrays=2)[0] == per - 128 - 1
    # Nothing to share but the batch: five products on two arrays are three after another.
    five = shared_cycles(column(1), column(1), column(128), ws, arrays=2, batch=column(5))[0]
    assert five == 3 * (1 + 3 * 128 - 2) - 1
    assert shared_cycles(column(0), column(4), column(4), ws, arrays=8)[0] == 0


def test_convolutions_are_products_of_windows() -> None:
    one = np.ones(1)
    sizes = {
        "height": 8 * one,
        "width": 11 * one,
        "kernel_height": 3 * one,
        "kernel_width": 2 * one,
        "channels": 4 * one,
        "filters": 6 * one,
        "stride": 2 * one,
    }
    plain = convolution_product(**sizes)
    # ceil((8 - 3 + 2) / 2) = 4 rows of ceil((11 - 2 + 2) / 2) = 6 places.
    assert (plain.m[0], plain.n[0], plain.k[0], plain.batch[0]) == (24, 6, 24, 1)
    grouped = convolution_product(**sizes, images=3 * one, groups=2 * one, dilation=2 * one)
    # A dilated window reaches 5 x 3: ceil(5 / 2) = 3 by ceil(10 / 2) = 5 places, of 3 images, in 2 groups.
    assert (grouped.m[0], grouped.n[0], grouped.k[0], grouped.batch[0]) == (45, 3, 12, 2)
    assert convolution_product(**(sizes | {"height": one})).m[0] == 0


@pytest.mark.parametrize("text", ["", "128", "0x4", "4x", "x4", "-1x4", "4x4x4", "4,4", "9999999x1"])
def test_wrong_shapes_of_arrays(text: str) -> None:
    with pytest.raises(UsageError, match="128x128"):
        parse_array(text)


def test_spellings() -> None:
    assert parse_array("8X32") == (8, 32)
    assert parse_dataflow("WS") == "ws"
    with pytest.raises(UsageError, match="os, ws or is"):
        parse_dataflow("rs")
