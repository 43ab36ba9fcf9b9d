"""Times that a Perfetto trace cannot hold are refused, not wrapped round."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

from hespas.converters.format import WriteOptions
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
