"""One trace per class and the rank map: they restore the whole job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hespas
from hespas.converters import WriteOptions
from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.expansion import PeerLookup, RankValues
from hespas.converters.chakra.rank_map import FILE_NAME
from hespas.graph import (
    ABSENT,
    CollectiveKind,
    ExplicitGroups,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    StridedGroups,
    Workload,
)
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError

RANKS = 24
UNEVEN = ExplicitGroups.from_rows([[0, 1, 2], [3, 5], [7, 6, 9, 8], [11]])


def graph_of(name: str) -> OpGraph:
    """Return a graph with all differences of ranks in a class: strided, listed and full groups; shifts,
    rings, pairs.
    """
    b = GraphBuilder(name)
    row = b.strings.add("op")
    last = b.add_node(name_id=row, op_id=row, op_class=OpClass.CONTRACTION, flops=3.0, bytes_read=8.0)
    sets = (
        StridedGroups.from_mesh([3, 8], [1]),
        StridedGroups.from_mesh([3, 8], [0]),
        StridedGroups.all_ranks(RANKS),
        UNEVEN,
    )
    for groups in sets:
        last = b.add_node(
            name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE, data_deps=[last]
        )
        kind = CollectiveKind.ALL_REDUCE
        b.add_collective(last, kind, group_set=b.group_set(groups), comm_bytes=64)
    ways = (
        Permutation(RANKS, (3, 8), 1, wraps=False),
        Permutation(RANKS, (8, 1), 1),
        Permutation.from_pairs([(0, 5), (5, 0), (2, 9)], RANKS),
    )
    for tag, way in enumerate(ways):
        last = b.add_node(
            name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.PERMUTE, data_deps=[last]
        )
        b.add_p2p(last, permutation=b.permutation(way), comm_bytes=64, tag=tag)
    return b.build()


def job(classes: int = 2) -> Workload:
    rank_class = np.arange(RANKS, dtype=np.int32) % classes
    return Workload(
        name="job", classes=tuple(graph_of(f"c{i}") for i in range(classes)), rank_class=rank_class
    )


def put(workload: Workload, folder: Path, *, only_classes: bool) -> Path:
    options = WriteOptions(name="job", only_classes=only_classes)
    hespas.write(workload, folder, format="chakra", options=options)
    return folder


def read(path: Path) -> Workload:
    value = hespas.read(path)
    assert isinstance(value, Workload)
    return value


def tree(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}


def test_the_files_of_classes_are_those_of_their_lowest_ranks(tmp_path: Path) -> None:
    whole = tree(put(job(), tmp_path / "whole", only_classes=False))
    classes = tree(put(job(), tmp_path / "classes", only_classes=True))
    document = msgspec.json.decode(classes.pop(FILE_NAME))
    assert classes.items() <= whole.items()
    stands: list[int] = document["representative"]
    assert sorted(set(stands)) == sorted(int(name.split(".")[1]) for name in classes if name.endswith(".et"))
    assert all(stands.index(rank) == rank for rank in set(stands))


def test_a_folder_of_classes_is_the_whole_job(tmp_path: Path) -> None:
    whole = put(job(), tmp_path / "whole", only_classes=False)
    classes = put(job(), tmp_path / "classes", only_classes=True)
    back = read(classes)
    assert back.is_complete
    assert back.num_ranks == RANKS
    assert tree(put(back, tmp_path / "again", only_classes=False)) == tree(whole)
    assert tree(put(back, tmp_path / "classes again", only_classes=True)) == tree(classes)
    used = {groups for graph in back.classes for groups in graph.group_sets}
    assert used <= set(job().group_sets)
    assert StridedGroups.from_mesh([3, 8], [1]) in used  # digits, of all ranks, and not only those of a class


def test_a_class_without_idle_nodes_comes_back_as_it_was(tmp_path: Path) -> None:
    b = GraphBuilder("job")
    row = b.strings.add("op")
    node = b.add_node(
        name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE, flops=0.0
    )
    groups = b.group_set(StridedGroups.from_mesh([4, 2, 4], [1]))
    b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=64)
    first = read(put(Workload.spmd(b.build(), 32), tmp_path / "a", only_classes=True))
    assert first.group_sets == (StridedGroups.from_mesh([4, 2, 4], [1]),)
    second = read(put(first, tmp_path / "b", only_classes=True))
    assert workloads_equal(first, second) == []
    listed = read(put(first, tmp_path / "c", only_classes=False))
    assert listed.num_ranks == 32


def test_ranks_that_are_not_here_stay_absent(tmp_path: Path) -> None:
    rank_class = np.where(np.arange(RANKS) < 8, 0, ABSENT).astype(np.int32)
    some = Workload(name="job", classes=(graph_of("job"),), rank_class=rank_class)
    back = read(put(some, tmp_path / "out", only_classes=True))
    assert back.present.tolist() == list(range(8))
    assert back.num_ranks == RANKS


@pytest.mark.parametrize("only_classes", [True, False])
def test_both_pass_the_check_for_astra_sim(tmp_path: Path, only_classes: bool) -> None:
    b = GraphBuilder("job")
    row = b.strings.add("op")
    work = b.add_node(name_id=row, op_id=row, op_class=OpClass.CONTRACTION, flops=3.0, bytes_read=8.0)
    b.set(work, duration_ns=1000)
    node = b.add_node(
        name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE, data_deps=[work]
    )
    groups = b.group_set(StridedGroups.from_mesh([4, 2, 4], [1]))
    b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=64)
    out = put(Workload.spmd(b.build(), 32), tmp_path / "out", only_classes=only_classes)
    report = hespas.check(out, profile="astra-sim")
    assert report.valid
    assert report.violations == ()
    assert report.details.inputs[0].num_ranks == 32
    assert report.details.inputs[0].complete


# --- Maps that do not hold together

_Change = Callable[[dict[str, Any]], object]


WRONG_MAPS: list[tuple[_Change, str]] = [
    (lambda m: m.update(num_ranks=25), "representatives of 24 ranks"),
    (lambda m: m["representative"].__setitem__(23, 99), "represents rank 23 but is not a class"),
    (lambda m: m["representative"].__setitem__(0, 1), "does not represent itself"),
    (lambda m: m["classes"].pop(), "does not represent any rank"),
    (lambda m: m["classes"].reverse(), "list of classes is not in ascending order"),
    (lambda m: m["classes"][0]["collectives"].append(0), "but its file has"),
    (lambda m: m["classes"][0]["collectives"].__setitem__(0, 77), "outside 0"),
    (lambda m: m["classes"][0]["collectives"].__setitem__(0, -2), "outside 0"),
    (lambda m: m["classes"][0]["collectives"].__setitem__(0, 1), "has other ranks"),
    (lambda m: m["classes"][0]["messages"].__setitem__(0, 1), "names a peer that differs"),
    (lambda m: m["group_sets"][0].update(base=1), "or a rank outside 0..23"),
    (lambda m: m["group_sets"][0].update(member_digits=[[0, 0]]), "do not tile"),
    (lambda m: m["group_sets"][3]["groups"].append([0]), "it has a repeated rank"),
    (lambda m: m["permutations"][0].update(num_ranks=48), "has 48 ranks, but the job has 24"),
    (lambda m: m["permutations"][0].update(digit=[5, 1]), "does not divide"),
    (lambda m: m["permutations"][0].update(shift=1 << 70), "but the job has 24 ranks"),
    (lambda m: m.update(representative=[1 << 70] * 24), "too large"),
    (lambda m: m.update(schema="hespas.rank-map/2"), "schema"),
    (lambda m: m.pop("classes"), "classes"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_MAPS)
def test_a_map_that_does_not_fit_is_refused(change: _Change, message: str, tmp_path: Path) -> None:
    folder = put(job(1), tmp_path / "out", only_classes=True)
    document = msgspec.json.decode((folder / FILE_NAME).read_bytes())
    change(document)
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(document))
    with pytest.raises(FormatError, match=message) as caught:
        hespas.read(folder)
    assert caught.value.code == "ET022"
    assert hespas.check(folder).valid is False


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    folder = put(job(), tmp_path / "out", only_classes=True)
    (folder / "job.1.et").unlink()
    with pytest.raises(FormatError, match="file of rank 1 is missing"):
        hespas.read(folder)


def test_a_whole_set_replaces_one_of_classes(tmp_path: Path) -> None:
    folder = put(job(), tmp_path / "out", only_classes=True)
    options = WriteOptions(name="job")
    hespas.write(job(), folder, format="chakra", options=options, overwrite=True)
    assert not (folder / FILE_NAME).exists()
    assert len(list(folder.glob("*.et"))) == RANKS


# --- Values of many ranks at once are those of each


@settings(max_examples=40)
@given(
    sets=st.lists(st.sampled_from([*job().group_sets]), max_size=3, unique=True),
    shift=st.integers(-2, 2),
    wraps=st.booleans(),
    pairs=st.dictionaries(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1), max_size=6),
)
def test_values_of_all_ranks_are_those_of_each(
    sets: list[StridedGroups | ExplicitGroups], shift: int, wraps: bool, pairs: dict[int, int]
) -> None:
    b = GraphBuilder("job")
    row = b.strings.add("op")
    for groups in sets:
        node = b.add_node(name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
        b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=b.group_set(groups), comm_bytes=1)
    one_each = {target: source for source, target in pairs.items()}
    listed = Permutation.from_pairs([(source, target) for target, source in one_each.items()], RANKS)
    for way in (Permutation(RANKS, (3, 8), shift, wraps), listed):
        node = b.add_node(name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.SEND)
        b.add_p2p(node, permutation=b.permutation(way), comm_bytes=1)
    graph = b.build()
    ids = GroupIds.of(Workload.spmd(graph, RANKS))
    values = RankValues.of(graph, np.arange(RANKS), ids, dict[Permutation, PeerLookup]())
    widths = values.widths()
    for rank in range(RANKS):
        variables = values.variables(rank)
        names = [ids.text(groups, rank) for groups in graph.group_sets]
        ways = [(way.target_of(rank), way.source_of(rank)) for way in graph.permutations]
        assert variables == (*names, rank, *(max(0, peer) for pair in ways for peer in pair))
        alone = values.take(np.array([rank]))
        spelled = alone.spelled(tuple(widths[rank].tolist())).tobytes()
        assert spelled == b"".join(
            value if isinstance(value, bytes) else bytes([value]) for value in variables
        )


def test_reading_does_not_import_the_writer() -> None:
    """The writer needs recorded steps and operator costs, whose import takes longer than a small trace."""
    script = (
        "import sys, hespas.converters.chakra.reader\n"
        "writer = {'hespas.converters.chakra.lowering', 'hespas.converters.measured_ops', 'hespas.costs'}\n"
        "print(sorted(writer & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"
