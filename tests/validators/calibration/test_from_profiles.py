"""Recordings as measured operations: equal ones once, all with known costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware import load_device
from hespas.measurements import LeftOut, joined
from hespas.validators.calibration import measurements_of
from tests.validators.accuracy.small_profiles import Recording


def recorded(name: str, extents: tuple[int, ...], times_us: tuple[float, ...]) -> Recording:
    made = Recording(name)
    for extent in extents:
        for time_us in times_us:
            made.event("aten::relu", time_us * 1e3, shapes=f"[[{extent}, {extent}]]", dtypes="float")
    return made


def test_equal_operations_are_one_row_with_their_median() -> None:
    found = measurements_of(recorded("one", (1024, 2048), (10.0, 11.0, 15.0)).build(), "H100-SXM")
    assert len(found) == 2
    assert found.duration_ns.tolist() == [11_000.0, 11_000.0]
    assert found.spread_ns == pytest.approx([5_000 / 3, 5_000 / 3])
    # 1024 x 1024 and 2048 x 2048 elements, in rows of 4096 however they are shaped.
    assert sorted(found.ops.dim("rows").tolist()) == [256.0, 1024.0]
    assert (found.ops.kind.used(), found.hardware.used(), found.ops.variant.used()) == (
        ("vector",), ("H100-SXM",), ("",),
    )  # fmt: skip
    assert found.split.used() == ("",)


def test_an_even_number_of_times_and_a_single_one() -> None:
    assert measurements_of(recorded("one", (64,), (1.0, 4.0)).build(), "H100-SXM").duration_ns == [2_500.0]
    single = measurements_of(recorded("one", (64,), (3.0,)).build(), "H100-SXM")
    assert single.duration_ns == [3_000.0]
    assert np.isnan(single.spread_ns).all()


def test_what_has_no_cost_is_counted_not_fitted() -> None:
    made = recorded("one", (64,), (3.0,))
    made.event("my::op", 7_000.0, shapes="[[64, 64]]", dtypes="float")
    found = measurements_of(made.build(), "H100-SXM")
    assert len(found) == 1
    assert found.left_out == (LeftOut("no known cost, or a time that depends on others", 1),)


def test_several_recordings_are_one_table() -> None:
    parts = [
        measurements_of(recorded(name, (extent,), (3.0,)).build(), "H100-SXM")
        for name, extent in (("one", 64), ("two", 128))
    ]
    table = joined(parts, "both")
    assert (table.name, len(table)) == ("both", 2)
    assert (table.ops.dim("rows") * table.ops.dim("columns")).tolist() == [64.0**2, 128.0**2]
    assert table.recorded
    assert table.provenance == "the recording one of one; the recording two of two"


def test_events_of_other_devices_are_left_out_and_told() -> None:
    profile = recorded("one", (64, 128), (3.0,)).build(devices=("NVIDIA H100 80GB HBM3", "MI300X"))
    diagnostics = Diagnostics()
    both = replace(profile, device_index=np.array([0, 1], np.int32))
    found = measurements_of(both, "H100-SXM", diagnostics=diagnostics)
    assert found.ops.flops.tolist() == [64.0 * 64]
    assert diagnostics.counts() == {"accuracy.other-device": 1}
    diagnostics = Diagnostics()
    other = recorded("one", (64,), (3.0,)).build(devices=("MI300X",))
    assert len(measurements_of(other, load_device("H100-SXM"), diagnostics=diagnostics)) == 1
    [told] = list(diagnostics)
    assert "recorded on MI300X, but compared with estimates for H100-SXM" in told.message


def test_a_recording_without_operations_says_so() -> None:
    made = Recording()
    made.event("", 10.0, kernel="k")
    with pytest.raises(UsageError, match="has no operations with shapes"):
        measurements_of(made.build(), "H100-SXM")
