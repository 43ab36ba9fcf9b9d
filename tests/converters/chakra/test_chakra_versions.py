"""Old schemas: one program in every version reads to the same graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from hespas import api
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions
from hespas.graph import CollectiveKind, Diagnostics, Workload
from tests.converters.chakra.historic_protos import (
    OLD_VERSIONS,
    Logical,
    classes,
    encode,
    framed,
    graph_nodes,
    rich_nodes,
)
from tests.converters.chakra.version_support import OLD, differences, names_of, read

_WITH_TEXTS = OLD[1:]
_WITH_METADATA = [label for label, proto in OLD_VERSIONS.items() if proto.has_metadata]


@pytest.mark.parametrize("version", OLD)
def test_one_program_in_every_schema_is_one_graph(tmp_path: Path, version: str) -> None:
    today, _ = read(tmp_path, encode("0.0.4", graph_nodes()))
    found, diagnostics = read(tmp_path, encode(version, graph_nodes()))
    assert differences(found, today) == []
    assert found.metadata["version"] in names_of(version)
    migrated = [entry for entry in diagnostics if entry.code == "chakra.migrated"]
    assert len(migrated) == 1
    assert found.metadata["version"] in migrated[0].message
    assert diagnostics.counts()["chakra.run-time-unit"] == 2
    kinds = [CollectiveKind(kind).name for kind in found.classes[0].collectives.kind.tolist()]
    assert kinds == ["ALL_REDUCE", "ALL_GATHER", "ALL_TO_ALL", "REDUCE_SCATTER"]
    assert found.classes[0].duration_ns[[1, 8]].tolist() == [17e3, 3e3]


_UNITS: list[tuple[Literal["", "us", "ns"], float]] = [("", 1e3), ("us", 1e3), ("ns", 1.0)]


@pytest.mark.parametrize("version", OLD)
def test_run_times_without_a_unit_are_in_the_one_that_the_user_names(tmp_path: Path, version: str) -> None:
    for unit, factor in _UNITS:
        (tmp_path / "a.et").write_bytes(encode(version, graph_nodes()))
        found = Diagnostics()
        options = ReadOptions(run_time_unit=unit)
        value = api.read(tmp_path / "a.et", options=options, diagnostics=found)
        assert isinstance(value, Workload)
        assert value.classes[0].duration_ns[[1, 8]].tolist() == [17 * factor, 3 * factor]
        told = next(entry.message for entry in found if entry.code == "chakra.run-time-unit")
        assert "`run_time_unit=ns`" in told
        assert ("likely unit" in told) == (version == "0.0.1")
        api.write(value, tmp_path / "out.et", overwrite=True)
        again = api.read(tmp_path / "out.et")
        assert isinstance(again, Workload)
        assert again.classes[0].duration_ns[[1, 8]].tolist() == [17 * factor, 3 * factor]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("version", _WITH_TEXTS)
def test_texts_and_attributes_of_every_type_are_kept(tmp_path: Path, version: str, packed: bool) -> None:
    nodes = rich_nodes(version)
    today, _ = read(tmp_path, encode("0.0.4", nodes))
    found, _ = read(tmp_path, encode(version, nodes, packed=packed))
    assert differences(found, today) == []


@pytest.mark.parametrize("version", _WITH_METADATA)
@pytest.mark.parametrize("metadata", [{}, {"schema": "1.0.1-chakra", "pid": 77, "time": "now"}])
def test_metadata_are_kept(tmp_path: Path, version: str, metadata: dict[str, Any]) -> None:
    nodes = rich_nodes(version)
    today, _ = read(tmp_path, encode("0.0.4", nodes, metadata))
    found, _ = read(tmp_path, encode(version, nodes, metadata))
    assert differences(found, today) == []


def test_early_metadata_of_today_s_schema(tmp_path: Path) -> None:
    metadata = {"schema": "1.0.2", "pid": 3}
    today, _ = read(tmp_path, encode("0.0.4", rich_nodes(), metadata, label="0.0.4"))
    early, diagnostics = read(tmp_path, encode("0.0.4-2023-10-10", rich_nodes(), metadata))
    assert differences(early, today) == []
    assert early.metadata["version"] == "0.0.4-2023-10-10"
    assert diagnostics.counts()["chakra.migrated"] == 1


def test_unsigned_attributes(tmp_path: Path) -> None:
    made = classes("0.0.3-2023-08-05")
    node = made["Node"](id=1, name="n", type=4)
    node.attribute.add(name="big", type=2, u=(1 << 64) - 1)
    node.attribute.add(name="many", type=7, uints=[1, 1 << 63])
    node.attribute.add(name="small", type=2, u=5)
    node.attribute.add(name="signed", type=3, i=-5)
    (tmp_path / "a.et").write_bytes(framed(node.SerializeToString()))
    attrs = read_columns(tmp_path / "a.et", Diagnostics()).attrs
    assert attrs.keys == ("big", "many", "small", "signed")
    assert attrs.field.tolist() == [13, 14, 13, 9]
    assert attrs.bits[[0, 2, 3]].tolist() == [(1 << 64) - 1, 5, (1 << 64) - 5]
    assert attrs.payload[0] == b"\x0a\x0b\x01" + b"\x80" * 9 + b"\x01"


def test_what_attributes_lack_is_not_made_up(tmp_path: Path) -> None:
    """Chakra's converter declared a type and left the value out; an empty list is a list."""
    made = classes("0.0.3-2023-07-07")
    node = made["Node"](id=1, name="n", type=4)
    node.attribute.add(name="seq_id", type=2)
    node.attribute.add(name="dims", type=6, doc_string="none")
    node.attribute.add(name="op", type=3, s="mm")
    (tmp_path / "a.et").write_bytes(framed(node.SerializeToString()))
    attrs = read_columns(tmp_path / "a.et", Diagnostics()).attrs
    assert attrs.field.tolist() == [0, 10, 29]
    assert list(attrs.payload) == [b"", b"mm"]
    assert (attrs.doc_row.tolist(), attrs.doc.text(0)) == ([1], "none")


def test_bytes_that_are_no_text_stay_bytes(tmp_path: Path) -> None:
    made = classes("0.0.2")
    node = made["Node"](id=1, name="n", type=3)
    node.attribute.add(name="raw", type=5, strings=[b"\xff\xfe", b"a"])
    (tmp_path / "a.et").write_bytes(framed(node.SerializeToString()))
    attrs = read_columns(tmp_path / "a.et", Diagnostics()).attrs
    assert attrs.field.tolist() == [32]
    assert attrs.payload[0] == b"\x0a\x02\xff\xfe\x0a\x01a"


def test_fields_of_the_first_schema_are_attributes_of_today(tmp_path: Path) -> None:
    attrs = {
        "comm_size": (1 << 32) - 1,
        "comm_tag": (1 << 32) - 1,
        "num_ops": (1 << 64) - 1,
        "communicator_id": 4,
        "comm_priority": 2,
        "tensor_loc": 2,
        "input_tensor_loc": 1,
        "input_tensor_size": 9,
        "output_tensor_loc": 0,
        "output_tensor_size": 10,
    }
    (tmp_path / "a.et").write_bytes(encode("0.0.1", [Logical(0, "n", "MEM_LOAD", attrs=attrs)]))
    columns = read_columns(tmp_path / "a.et", Diagnostics())
    found = columns.attrs
    names = [found.keys[key] for key in map(int, found.key)]
    typed = zip(map(int, found.field), map(int, found.bits), strict=True)
    values = dict(zip(names, typed, strict=True))
    assert values == {
        "comm_size": (9, (1 << 32) - 1),
        "comm_tag": (11, (1 << 32) - 1),
        "num_ops": (13, (1 << 64) - 1),
        "communicator_id": (11, 4),
        "comm_priority": (7, 2),
        "tensor_loc": (11, 2),
        "input_tensor_loc": (11, 1),
        "input_tensor_size": (13, 9),
        "output_tensor_size": (13, 10),
    }
    assert columns.type.tolist() == [2]
