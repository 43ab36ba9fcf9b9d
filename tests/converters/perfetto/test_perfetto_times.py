"""Times that a Perfetto trace cannot store are rejected; all others are stored exactly."""

from __future__ import annotations

import struct
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.perfetto.reader import read_perfetto
from hespas.converters.perfetto.writer import write_perfetto
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import StringTableBuilder
from hespas.graph.errors import UnsupportedError

_PAST = float(1 << 63)


def _written(path: Path, start_ns: list[float], duration_ns: list[float]) -> Path:
    profile = Profile.of(
        "p",
        ("H100-SXM",),
        StringTableBuilder().build(),
        start_ns=np.array(start_ns),
        duration_ns=np.array(duration_ns),
    )
    write_perfetto(profile, path, WriteOptions(name="x.pftrace"), Diagnostics())
    return path


@pytest.mark.parametrize(
    ("start_ns", "duration_ns"),
    [
        ([0.0, 2.0**62], [1.0, 2.0**62]),
        ([_PAST], [0.0]),
        ([-(2.0**62), 2.0**62], [1.0, 1.0]),
        ([0.0], [inf]),
        ([1e300], [1.0]),
    ],
)
def test_a_time_past_63_bits_is_refused(
    start_ns: list[float], duration_ns: list[float], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="63 bits") as caught:
        _written(tmp_path / "x.pftrace", start_ns, duration_ns)
    assert caught.value.path == "x.pftrace"
    assert not (tmp_path / "x.pftrace").exists()


def test_the_largest_times_are_written(tmp_path: Path) -> None:
    last = float(np.nextafter(_PAST, 0.0))
    assert _written(tmp_path / "x.pftrace", [0.0, 5.0], [last, 1.0]).stat().st_size


@pytest.mark.parametrize("told", [inf, -inf, 1e308, -1e308, nan, 5.0])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_told_of_a_time_counts_where_it_is_what_is_shown(
    place: int, told: float, tmp_path: Path
) -> None:
    exact = (100.25, 1200.75)
    path = _written(tmp_path / "x.pftrace", [0.0, exact[0]], [10.0, exact[1]])
    whole = read_perfetto(path, ReadOptions(), Diagnostics())
    assert (whole.start_ns[1], whole.duration_ns[1]) == exact
    old, new = struct.pack("<d", exact[place]), struct.pack("<d", told)
    path.write_bytes(path.read_bytes().replace(old, new))
    edited = read_perfetto(path, ReadOptions(), Diagnostics())
    found = (edited.start_ns[1], edited.duration_ns[1])
    assert found[place] == (100.0, 1201.0)[place]
    assert found[1 - place] == exact[1 - place]


@pytest.mark.parametrize("duration_ns", [nan, -3.0, -2.5])
def test_a_duration_that_is_none_is_kept(duration_ns: float, tmp_path: Path) -> None:
    path = _written(tmp_path / "x.pftrace", [0.0, 7.5], [10.0, duration_ns])
    found = read_perfetto(path, ReadOptions(), Diagnostics())
    in_order = found.duration_ns[np.argsort(found.start_ns)]
    np.testing.assert_array_equal(in_order, [10.0, duration_ns])
