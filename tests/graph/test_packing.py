"""Packed workloads: equal after unpacking, and safe to unpack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hespas import api
from hespas.graph import ExplicitGroups, Permutation, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.packing import pack, unpack

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _program(name: str) -> Workload:
    workload = api.read(FIXTURES / name)
    assert isinstance(workload, Workload)
    return workload


@pytest.mark.parametrize("name", ["stablehlo/mlp.mlir", "hlo", "op_graph"])
def test_an_unpacked_workload_is_equal(name: str) -> None:
    path = FIXTURES / name
    file = next(entry for entry in sorted(path.iterdir()) if entry.is_file()) if path.is_dir() else path
    workload = _program(str(file.relative_to(FIXTURES)))
    again = unpack(pack(workload))
    assert workloads_equal(again, workload) == []
    assert (again.name, again.metadata) == (workload.name, workload.metadata)
    for one, two in zip(again.classes, workload.classes, strict=True):
        assert list(one.strings) == list(two.strings)
        assert one.group_sets == two.group_sets
        assert one.permutations == two.permutations
        assert dict(one.attachments) == dict(two.attachments)


def test_names_that_are_not_utf_8_and_constant_and_shared_columns_survive() -> None:
    workload = _program("stablehlo/mlp.mlir")
    nodes = len(workload.classes[0])
    constant, shared = np.broadcast_to(np.float64(3.0), (nodes,)), np.arange(nodes, dtype=np.float64)
    graph = replace(
        workload.classes[0],
        name="x\udcff",
        flops=shared,
        useful_flops=shared,
        duration_ns=constant,
        group_sets=(ExplicitGroups(((0, 1), (2,))),),
        permutations=(Permutation(4, pairs=((0, 1), (1, 0))),),
    )
    again = unpack(pack(replace(workload, name="\udc80", classes=(graph,))))
    assert again.name == "\udc80"
    (one,) = again.classes
    assert one.name == "x\udcff"
    assert one.flops is one.useful_flops
    assert one.duration_ns.strides == (0,)
    np.testing.assert_array_equal(one.duration_ns, constant)
    assert one.group_sets == graph.group_sets
    assert one.permutations == graph.permutations


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(([], ["Path", {}])),
        msgspec.msgpack.encode(([], ["tuple", []])),
        msgspec.msgpack.encode(([], ["Workload", {"name": "x"}])),
        msgspec.msgpack.encode(([["<f8", [4], False, b"12345678"]], ["array", 0])),
        msgspec.msgpack.encode(([], ["array", 7])),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(data)
