from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hespas.graph.errors import UsageError
from hespas.graph.mesh import Mesh


def test_a_mesh_is_read_as_it_is_written() -> None:
    mesh = Mesh.of("data=64, model=8")
    assert mesh == Mesh(("data", "model"), (64, 8)) == Mesh.of({"data": 64, "model": 8}) == Mesh.of(mesh)
    of_jax: Any = SimpleNamespace(shape={"data": 64, "model": 8})
    assert Mesh.of(of_jax) == mesh
    of_numpy: Any = {"data": np.int64(64)}
    assert type(Mesh.of(of_numpy).sizes[0]) is int
    assert str(mesh) == "data=64,model=8"
    assert mesh.num_devices == 512


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not AXIS=N"),
        ("data", "not AXIS=N"),
        ("data=", "not AXIS=N"),
        ("data=x", "not AXIS=N"),
        ("data=-2", "not AXIS=N"),
        ("data=²", "not AXIS=N"),
        ("data=0", "1 or more"),
        ("data=2,data=4", "named twice"),
        ("data=999999999", "exceed the limit of"),
        ("data=" + "9" * 5000, "not AXIS=N"),
    ],
)
def test_what_is_no_mesh_is_refused_with_the_form(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Mesh.of(text)


@pytest.mark.parametrize(
    "axes", [{"data": "8"}, {"data": 8.0}, {"data": True}, {3: 8}, [("data", 8)], 8, None]
)
def test_what_has_no_sizes_of_axes_is_no_mesh(axes: Any) -> None:
    with pytest.raises(UsageError, match="mesh:"):
        Mesh.of(axes)
