"""Process groups of traces: overlapping, of the same ranks, of all ranks; and sets of some ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hespas import api
from hespas.converters import load_format
from hespas.converters.chakra import FORMAT
from hespas.converters.chakra.contract import AttributeFacts
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.graph import ABSENT, Diagnostics, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.checker import CheckOptions, Profile, check, check_workload
from hespas.validators.roundtrip import ColumnStatus, compare_columns
from tests.converters.chakra.conftest import Reference

_ALL_REDUCE = 0


def _set(
    reference: Reference,
    folder: Path,
    groups: dict[str, list[int]],
    ranks: Sequence[Sequence[str]],
    *,
    of: dict[str, int] | None = None,
) -> Path:
    """Rank files of all-reduces one after the other; ``ranks`` lists the group names of each."""
    folder.mkdir()
    for rank, names in enumerate(ranks):
        nodes: list[Any] = []
        for number, name in enumerate(names):
            node = reference.node(id=number, name=f"reduce{number}", type=7)
            node.attr.add(name="is_cpu_op", bool_val=False)
            node.attr.add(name="comm_type", int64_val=_ALL_REDUCE)
            node.attr.add(name="comm_size", int64_val=4096)
            if name:
                node.attr.add(name="pg_name", string_val=name)
            node.data_deps.extend([number - 1] if number else [])
            nodes.append(node)
        (folder / f"w.{rank}.et").write_bytes(reference.file(*nodes))
    if groups:
        (folder / "comm_group.json").write_text(json.dumps(groups))
    return folder


def _read(path: Path, name: str = "chakra", **options: int) -> Workload:
    form = load_format(name)
    assert form.read is not None
    value = form.read(path, ReadOptions(num_devices=options.get("num_devices")), Diagnostics())
    assert isinstance(value, Workload)
    return value


def _write(workload: Workload, path: Path, name: str = "chakra", ranks: range | None = None) -> Path:
    form = load_format(name)
    assert form.write is not None
    form.write(workload, path, WriteOptions(name=path.name, ranks=ranks), Diagnostics())
    return path


def _names(path: Path) -> list[str]:
    """``pg_name`` by node, empty where there is none."""
    columns = read_columns(path, Diagnostics())
    found = AttributeFacts.of(columns.attrs).texts("pg_name")
    names = [""] * len(columns)
    for node, row in zip(found.node.tolist(), found.value.tolist(), strict=True):
        names[node] = columns.attrs.payload.text(int(row))
    return names


_PIPELINE = {str(number): [number - 1, number] for number in range(1, 5)}
_STAGES = (("1",), ("1", "2"), ("2", "3"), ("3", "4"), ("4",))
_DIAMOND = {"1": [0, 1], "2": [0, 1]}
_WORLD = {"1": [0, 1], "7": [0, 1]}


@pytest.mark.parametrize(
    ("groups", "ranks"),
    [
        (_PIPELINE, _STAGES),
        (_DIAMOND, (("1", "2"), ("1", "2"))),
        (_DIAMOND, (("1", "2"), ("2", "1"))),
        (_DIAMOND, (("2", "2"), ("2", "2"))),
        (_WORLD, (("", "1"), ("", "1"))),
        (_WORLD, (("7", ""), ("7", ""))),
        ({"1": [0, 1], "2": [1, 0]}, (("1", "2"), ("1", "2"))),
        ({"3": [2, 0], "5": [1, 3]}, (("3",), ("5",), ("3",), ("5",))),
        ({"3": [0, 1, 2], "5": [3, 4]}, (("3",), ("3",), ("3",), ("5",), ("5",))),
        (
            {"1": [0, 1, 2, 3, 4], "2": [0, 1], "3": [1, 2]},
            (("2", "1"), ("2", "3"), ("3", "1"), ("1", ""), ("1",)),
        ),
    ],
)
def test_every_rank_keeps_its_groups_through_every_format(
    reference: Reference, tmp_path: Path, groups: dict[str, list[int]], ranks: Sequence[Sequence[str]]
) -> None:
    first = _read(_set(reference, tmp_path / "w", groups, ranks))
    for name, suffix in (("op-graph", ".json"), ("op-graph-arrow", ".arrow")):
        kept = _read(_write(first, tmp_path / f"kept{suffix}", name), name)
        assert workloads_equal(first, kept) == []
        again = _write(kept, tmp_path / f"again-{name}")
        for rank, names in enumerate(ranks):
            assert _names(again / f"again-{name}.{rank}.et") == list(names)
        assert (again / "comm_group.json").read_text() == json.dumps(groups)
        changed = [
            each
            for each in compare_columns(first, _read(again))
            if each.kept in {ColumnStatus.CHANGED, ColumnStatus.LOST}
        ]
        assert {each.column for each in changed} <= {"name"}


def test_overlapping_groups_are_of_as_few_classes_as_need_be(reference: Reference, tmp_path: Path) -> None:
    ends = [("1",), *((str(rank), str(rank + 1)) for rank in range(1, 63)), ("63",)]
    groups = {str(number): [number - 1, number] for number in range(1, 64)}
    workload = _read(_set(reference, tmp_path / "w", groups, ends))
    assert len(workload.classes) == 3  # both ends, the odd and the even stages between them
    for rank in range(1, 63):
        sets = workload.graph_of(rank).group_sets
        assert [sets[row].members(sets[row].group_of(rank)).tolist() for row in (0, 1)] == [
            [rank - 1, rank],
            [rank, rank + 1],
        ]


@pytest.mark.parametrize(
    ("groups", "ranks", "codes"),
    [
        (_PIPELINE, _STAGES, set[str]()),
        (_DIAMOND, (("1", "2"), ("1", "2")), set[str]()),
        (_DIAMOND, (("1", "2"), ("2", "1")), {"ET021"}),
        (_WORLD, (("1", ""), ("1", "")), set[str]()),
        (_WORLD, (("1", ""), ("", "1")), {"ET021"}),
    ],
)
def test_process_groups_match_each_for_itself(
    reference: Reference,
    tmp_path: Path,
    groups: dict[str, list[int]],
    ranks: Sequence[Sequence[str]],
    codes: set[str],
) -> None:
    workload = _read(_set(reference, tmp_path / "w", groups, ranks))
    found = check_workload(workload, "chakra")
    assert {each.code for each in found.violations if each.severity.name == "ERROR"} - {"ET029"} == codes


@pytest.mark.parametrize(("name", "suffix"), [("op-graph", ".json"), ("op-graph-arrow", ".arrow")])
def test_a_lone_rank_is_one_of_its_job(reference: Reference, tmp_path: Path, name: str, suffix: str) -> None:
    folder = _set(reference, tmp_path / "w", {"3": [2, 0], "5": [1, 3]}, (("3",), ("5",), ("3",), ("5",)))
    alone = _read(folder / "w.2.et")
    assert alone.rank_class.tolist() == [ABSENT, ABSENT, 0]  # as many ranks as it names
    assert _read(folder / "w.2.et", num_devices=4).rank_class.tolist() == [ABSENT, ABSENT, 0, ABSENT]
    assert not alone.is_complete
    assert alone.present.tolist() == [2]
    kept = _read(_write(alone, tmp_path / f"kept{suffix}", name), name)
    assert workloads_equal(alone, kept) == []
    again = _read(_write(kept, tmp_path / "again.et"))
    assert again.rank_class.tolist() == alone.rank_class.tolist()
    assert again.classes[0].group_sets == alone.classes[0].group_sets


def test_some_ranks_are_some_of_their_job(reference: Reference, tmp_path: Path) -> None:
    whole = _read(_set(reference, tmp_path / "w", _PIPELINE, _STAGES))
    some = _read(_write(whole, tmp_path / "some", ranks=range(1, 4)))
    assert some.num_ranks == 5
    assert some.present.tolist() == [1, 2, 3]
    for rank in (1, 2, 3):
        assert _names(tmp_path / "some" / f"some.{rank}.et") == list(_STAGES[rank])
    result = check_workload(some, "chakra")
    assert result.valid
    assert any("3 of 5 ranks" in note.message for note in result.diagnostics)


def test_ranks_that_are_not_here_are_not_written(reference: Reference, tmp_path: Path) -> None:
    alone = _read(_set(reference, tmp_path / "w", _PIPELINE, _STAGES) / "w.2.et")
    with pytest.raises(UsageError, match="not all available"):
        _write(alone, tmp_path / "other", ranks=range(1, 3))
    assert not (tmp_path / "other").exists()


def test_what_a_file_says_of_its_rank_counts_more_than_its_name(reference: Reference, tmp_path: Path) -> None:
    alone = _read(_set(reference, tmp_path / "w", _PIPELINE, _STAGES) / "w.2.et", num_devices=5)
    again = _read(_write(alone, tmp_path / "llama-3.1.et"))
    assert again.rank_class.tolist() == alone.rank_class.tolist()
    whole = _read(_set(reference, tmp_path / "one", {}, (("",),)))
    assert _read(_write(whole, tmp_path / "llama-3.2.et")).num_ranks == 1


def test_groups_of_ranks_without_files_are_told(reference: Reference, tmp_path: Path) -> None:
    folder = _set(reference, tmp_path / "w", _PIPELINE, _STAGES)
    (folder / "w.4.et").unlink()
    with pytest.raises(FormatError, match="ET019: process groups or messages name rank 4") as caught:
        _read(folder)
    assert "`num_devices`" in (caught.value.hint or "")
    assert _read(folder, num_devices=5).rank_class.tolist()[4] == ABSENT


def test_ranks_past_the_limit_take_no_memory(reference: Reference, tmp_path: Path) -> None:
    send = reference.node(id=0, name="send", type=5)
    send.attr.add(name="comm_dst", int32_val=2**31 - 1)
    (tmp_path / "w.et").write_bytes(reference.file(send))
    with pytest.raises(FormatError, match="ET014: comm_dst is above"):
        _read(tmp_path / "w.et")
    send.attr[0].int32_val = 2**24 - 1
    (tmp_path / "w.et").write_bytes(reference.file(send))
    workload = _read(tmp_path / "w.et")
    assert workload.num_ranks == 2**24
    assert workload.classes[0].permutations[0].target_of(0) == 2**24 - 1


def test_lone_ranks_are_named_by_their_file(reference: Reference, tmp_path: Path) -> None:
    assert FORMAT.read is not None
    (tmp_path / "w.99999999.et").write_bytes(reference.file(reference.node(id=0, name="a", type=4)))
    with pytest.raises(FormatError, match="ET022"):
        FORMAT.read(tmp_path / "w.99999999.et", ReadOptions(), Diagnostics())


@pytest.mark.parametrize(
    "text", ['{"1": [0, 18446744073709551616]}', '{"1": [0, 9223372036854775807]}', "[" * 100_000]
)
def test_hostile_group_files_are_malformed_input(reference: Reference, tmp_path: Path, text: str) -> None:
    folder = _set(reference, tmp_path / "w", {}, (("",), ("",)))
    (folder / "comm_group.json").write_text(text)
    with pytest.raises(FormatError, match=r"ET01[89]"):
        _read(folder)


def test_absent_ranks_run_nothing(reference: Reference, tmp_path: Path) -> None:
    from hespas.simulator import simulate

    alone = _read(_set(reference, tmp_path / "w", _PIPELINE, _STAGES) / "w.2.et", num_devices=5)
    done = simulate(alone)
    assert [found.num_ranks for found in done.classes] == [1]
    assert np.isnan(done.timeline.finish_ns).tolist() == [True, True, False, True, True]
    assert done.timeline.shown_by.tolist() == [-1, -1, 2, -1, -1]
    assert done.step_ns == done.timeline.finish_ns[2]


def _named(reference: Reference, folder: Path, name: str) -> None:
    for rank in range(4):
        node = reference.node(id=1, name="ar", type=7)
        node.attr.add(name="comm_type").int64_val = 0
        node.attr.add(name="comm_size").int64_val = 64
        node.attr.add(name="pg_name").string_val = name.format(half=rank // 2, number=rank // 2 + 1)
        (folder / f"job.{rank}.et").write_bytes(reference.file(node))


@pytest.mark.parametrize(
    "file", ["comm_group.json", "comm_groups.json", "job.json", "../comm_groups.json", "asked.json"]
)
@pytest.mark.parametrize(
    ("pattern", "names"), [("{number}", ["1", "2"]), ("dp{half}", ["dp0", "dp1"]), ("{half}", ["0", "1"])]
)
def test_groups_of_any_file_and_name_are_found(
    reference: Reference, tmp_path: Path, file: str, pattern: str, names: list[str]
) -> None:
    folder = tmp_path / "et"
    folder.mkdir()
    _named(reference, folder, pattern)
    (folder / file).write_text(json.dumps({names[0]: [0, 1], names[1]: [2, 3]}))
    (folder / "other.json").write_text('{"note": "no ranks"}')
    stated = folder / file if file == "asked.json" else None
    found = Diagnostics()
    workload = api.read(folder, options=ReadOptions(comm_groups=stated), diagnostics=found)
    assert isinstance(workload, Workload)
    rows = [[members.tolist() for members in groups] for groups in workload.group_sets]
    assert [sorted(row) for row in rows] == [[[0, 1], [2, 3]]]
    assert ("chakra.groups-file" in found.counts()) == (file != "comm_group.json")
    assert ("ET018" in found.counts()) == (pattern != "{number}")
    api.write(workload, f"{tmp_path}/out/")
    written = json.loads((tmp_path / "out" / "comm_group.json").read_text())
    assert sorted(written.values()) == [[0, 1], [2, 3]]
    assert all(int(name) > 0 for name in written)
    profiles: tuple[tuple[Profile | None, str], ...] = (
        (None, "warning"),
        ("chakra", "warning"),
        ("astra-sim", "error"),
    )
    for profile, severity in profiles:
        result = check([folder], profile, CheckOptions(comm_groups=stated))
        levels = {entry.severity.value for entry in result.violations if entry.code == "ET018"}
        assert levels == (set[str]() if pattern == "{number}" else {severity})


def test_ids_that_continue_from_rank_to_rank_make_no_classes(reference: Reference, tmp_path: Path) -> None:
    nodes: list[Any] = []
    for rank in range(6):
        nodes = [
            reference.node(id=100 * rank + step, name=f"n{step}", type=4, duration_micros=5)
            for step in range(4)
        ]
        for before, node in pairwise(nodes):
            node.data_deps.append(before.id)
        (tmp_path / f"w.{rank}.et").write_bytes(reference.file(*nodes))
    found = Diagnostics()
    workload = api.read(tmp_path, diagnostics=found)
    assert isinstance(workload, Workload)
    assert len(workload.classes) == 1
    assert found.counts()["chakra.renumbered"] == 5
    assert workload.classes[0].data_deps.values.tolist() == [0, 1, 2]
    last = reference.node(id=503, name="n3", type=4, duration_micros=5, data_deps=[501])
    (tmp_path / "w.5.et").write_bytes(reference.file(*nodes[:3], last))
    workload = api.read(tmp_path)
    assert isinstance(workload, Workload)
    assert len(workload.classes) == 2
