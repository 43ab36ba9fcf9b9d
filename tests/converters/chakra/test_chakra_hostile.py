"""Traces made to hang, to fill memory or to hide something: cycles, far ranks, long names, huge groups."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hespas.converters.chakra import FORMAT
from hespas.converters.chakra.comm_groups import check_listing
from hespas.converters.chakra.spelling import parse_contractions
from hespas.converters.chakra.wire.codec import iter_columns
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    StridedGroups,
    Workload,
)
from hespas.graph.errors import FormatError, UnsupportedError

_FLAG = {"name": "is_cpu_op", "bool_val": False}


def _node(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": number, "name": f"n{number}", "type": 4, "attr": [_FLAG], **fields}


def _read(path: Path, *, lenient: bool = False) -> tuple[Workload, Diagnostics]:
    assert FORMAT.read is not None
    diagnostics = Diagnostics()
    value = FORMAT.read(path, ReadOptions(lenient=lenient), diagnostics)
    assert isinstance(value, Workload)
    return value, diagnostics


def _file(reference: Any, path: Path, *nodes: dict[str, Any]) -> Path:
    path.write_bytes(reference.file(*(reference.node(**fields) for fields in nodes)))
    return path


@pytest.mark.parametrize("name", ["data_deps", "ctrl_deps"])
def test_a_cycle_is_named_and_left_to_the_checker_by_a_lenient_reader(
    reference: Any, tmp_path: Path, name: str
) -> None:
    nodes = (_node(5), _node(7, data_deps=[9]), _node(9, **{name: [7]}))
    path = _file(reference, tmp_path / "a.et", *nodes)
    with pytest.raises(FormatError, match=r"ET007: .*: 7 -> 9 -> 7\n") as caught:
        _read(path)
    assert caught.value.path == str(path)
    assert (caught.value.position or "").startswith("node 7 at byte ")
    assert caught.value.hint
    workload, diagnostics = _read(path, lenient=True)
    assert len(workload.classes[0]) == 3
    assert "ET007" not in diagnostics.counts()


def test_a_cycle_of_one_rank_of_a_set_is_found(reference: Any, tmp_path: Path) -> None:
    _file(reference, tmp_path / "a.0.et", _node(1))
    bad = _file(reference, tmp_path / "a.1.et", _node(1, data_deps=[2]), _node(2, data_deps=[1]))
    with pytest.raises(FormatError, match="ET007") as caught:
        _read(tmp_path)
    assert caught.value.path == str(bad)


def test_long_rings_are_shortened(reference: Any, tmp_path: Path) -> None:
    ring = (_node(place, data_deps=[(place + 1) % 1_000]) for place in range(1_000))
    with pytest.raises(FormatError, match=r"6 -> 7 -> \.\.\. \(992 more\) -> 0\n"):
        _read(_file(reference, tmp_path / "a.et", *ring))


@pytest.mark.parametrize("far", ["2000000000", "99999999999999999999", "999999999"])
def test_a_far_rank_is_told_and_not_counted_up_to(reference: Any, tmp_path: Path, far: str) -> None:
    for rank in ("0", far):
        _file(reference, tmp_path / f"a.{rank}.et", _node(1))
    with pytest.raises(FormatError, match="ET022") as caught:
        _read(tmp_path)
    assert caught.value.hint
    workload, diagnostics = _read(tmp_path, lenient=True)
    assert workload.num_ranks == 1
    assert diagnostics.counts()["ET022"] == 1


def test_digits_of_other_scripts_are_no_rank(reference: Any, tmp_path: Path) -> None:
    for rank in ("0", "\u0661"):
        _file(reference, tmp_path / f"a.{rank}.et", _node(1))
    workload, _ = _read(tmp_path)
    assert workload.num_ranks == 1


def test_a_pipe_in_the_place_of_a_rank_is_refused(reference: Any, tmp_path: Path) -> None:
    _file(reference, tmp_path / "a.0.et", _node(1))
    os.mkfifo(tmp_path / "a.1.et")
    with pytest.raises(FormatError, match="not a regular file") as caught:
        _read(tmp_path)
    assert caught.value.path == str(tmp_path / "a.1.et")


def test_room_is_planned_by_what_nodes_take(reference: Any, tmp_path: Path) -> None:
    """The first batch of this file holds its metadata alone, which says nothing about nodes."""
    path = _file(reference, tmp_path / "a.et", _node(1, name="n" * 3_000_000))
    guesses = [expected for chunk, expected in iter_columns(path, Diagnostics()) if len(chunk)]
    assert guesses == [pytest.approx(1.0, rel=0.01)]
    workload, _ = _read(path)
    assert len(workload.classes[0].node_name(0)) == 3_000_000


def test_many_attribute_names_keep_their_values(reference: Any, tmp_path: Path) -> None:
    attributes = [{"name": f"a{number}", "int64_val": number} for number in range(3_000)]
    path = _file(reference, tmp_path / "a.et", _node(1, attr=[_FLAG, *attributes]))
    graph = _read(path)[0].classes[0]
    extra = graph.extra
    found = {
        graph.strings[key]: int.from_bytes(
            extra.values[extra.offsets[row] : extra.offsets[row] + 8], "little"
        )
        for row, key in enumerate(extra.key.tolist())
    }
    assert {name: found.get(name) for name in ("a0", "a63", "a64", "a65", "a2999")} == {
        "a0": 0,
        "a63": 63,
        "a64": 64,
        "a65": 65,
        "a2999": 2999,
    }


def _job(num_ranks: int, groups: GroupSet) -> Workload:
    builder = GraphBuilder("job")
    name = builder.strings.add("sum")
    node = builder.add_node(name_id=name, op_id=name, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
    row = builder.group_set(groups)
    builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=row, comm_bytes=4)
    return Workload.spmd(builder.build(), num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "groups", "alone"),
    [
        (4, StridedGroups.all_ranks(2**31 - 1), True),
        (4, ExplicitGroups.from_rows([[0, 1], [2, 9]]), False),
        (1, StridedGroups.all_ranks(2**31 - 1), True),
        (1 << 25, StridedGroups.from_mesh((1 << 24, 2), (1,)), False),
    ],
)
def test_groups_too_large_to_list_are_refused(num_ranks: int, groups: GroupSet, alone: bool) -> None:
    with pytest.raises(UnsupportedError, match="group set 0") as caught:
        check_listing(_job(num_ranks, groups), alone=alone)
    assert caught.value.hint


def test_large_groups_that_need_no_list_pass() -> None:
    check_listing(_job(1 << 25, StridedGroups.all_ranks(1 << 25)), alone=False)
    check_listing(_job(1 << 25, StridedGroups.from_mesh((1 << 24, 2), (1,))), alone=True)
    with pytest.raises(UnsupportedError, match=r"rank 7, but the job has ranks 0\.\.0"):
        check_listing(_job(1, StridedGroups.all_ranks(8)), alone=True)


def test_a_folder_of_millions_of_files_is_refused(tmp_path: Path) -> None:
    assert FORMAT.write is not None
    job = _job(2_000_000, StridedGroups.all_ranks(2_000_000))
    with pytest.raises(UnsupportedError, match="2,000,000 files") as caught:
        FORMAT.write(job, tmp_path / "set", WriteOptions(name="set", directory=True), Diagnostics())
    assert "`ranks`" in (caught.value.hint or "")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("figure", ["1.2.3", "1e5e5", ".", "e", "+", "-", "1e-9-9", "inf", "1e9999"])
def test_figures_of_a_contraction_that_are_no_numbers_stay_an_attribute(figure: str) -> None:
    nodes, place = np.zeros(1, np.int64), np.zeros(1, np.int64)
    table, foreign = parse_contractions(nodes, [f"1x2x3x4 f32*f32>f32 flops={figure}"], place)
    assert (len(table), foreign.tolist()) == (0, [0])


@pytest.mark.parametrize("figure", ["5e-324", "1e-05", "0.5", "1e+22", "nan"])
def test_figures_of_a_contraction_are_read_as_they_are_written(figure: str) -> None:
    nodes, place = np.zeros(1, np.int64), np.zeros(1, np.int64)
    table, foreign = parse_contractions(nodes, [f"1x2x3x4 f32*f32>f32 flops={figure}"], place)
    assert (len(foreign), repr(float(table.flops[0]))) == (0, figure)


_LARGE = ((1 << 63) - 1, 1 << 62, (1 << 62) - 1, (1 << 53) + 1)
_COUNTS = ("num_ops", "tensor_size", "bytes_written")


@pytest.mark.parametrize(
    ("name", "value"),
    [*product(_COUNTS, (*_LARGE, -1, -(1 << 63))), *product(("duration_nanos",), _LARGE)],
)
def test_a_count_that_a_float_does_not_hold_stays_an_attribute(
    reference: Any, tmp_path: Path, name: str, value: int
) -> None:
    attributes = [_FLAG, {"name": name, "int64_val": value}]
    workload, diagnostics = _read(_file(reference, tmp_path / "a.et", _node(1, attr=attributes)))
    graph = workload.classes[0]
    assert np.isnan([graph.flops[0], graph.bytes_read[0], graph.duration_ns[0]]).all()
    assert name in {graph.strings[row] for row in graph.extra.key.tolist()}
    assert any(name in found.message for found in diagnostics)
