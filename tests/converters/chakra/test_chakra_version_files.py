"""Files and folders of old schemas: places of faults, the checker, and the labels that are written."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from hespas.converters.chakra import FORMAT
from hespas.converters.format import Head, ReadOptions, WriteOptions
from hespas.graph import Diagnostics, Severity, Workload
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.validators.checker import check
from tests.converters.chakra.historic_protos import (
    Logical,
    classes,
    encode,
    framed,
    graph_nodes,
    rich_nodes,
)
from tests.converters.chakra.version_support import ALL, OLD, differences, names_of, read


def test_an_old_node_far_behind_new_ones_is_refused(tmp_path: Path) -> None:
    new = encode("0.0.4", [Logical(number, "n", "COMP") for number in range(1, 500)])
    data = new + encode("0.0.3-2023-08-05", [replace(rich_nodes()[0], id=900)])
    with pytest.raises(UnsupportedError, match="ET003") as caught:
        read(tmp_path, data)
    assert caught.value.position == f"byte {len(new)}"


def test_a_new_node_behind_old_ones_is_an_error_of_that_node(tmp_path: Path) -> None:
    old = encode("0.0.1", [*graph_nodes(), *(Logical(i, "x" * 400, "COMP") for i in range(400, 5400))])
    stranger = framed(classes("0.0.4")["Node"](id=77, name="n", inputs={"values": "[]"}).SerializeToString())
    with pytest.raises(FormatError, match=r"ET003: this node does not match schema 0.0.1") as caught:
        read(tmp_path, old + stranger, version="0.0.1")
    assert caught.value.position == f"node 77 at byte {len(old)}"
    found, diagnostics = read(tmp_path, old + stranger, version="0.0.1", lenient=True)
    assert len(found.classes[0]) == len(graph_nodes()) + 5000
    assert [entry.location for entry in diagnostics if "skipped" in entry.message] == [caught.value.position]


def test_the_first_node_that_fits_nothing_is_placed(tmp_path: Path) -> None:
    old = encode("0.0.1", graph_nodes())
    data = old + encode("0.0.3-2023-08-05", rich_nodes())
    with pytest.raises(UnsupportedError, match=r"ET003.*do not match any version") as caught:
        read(tmp_path, data)
    assert caught.value.position == f"byte {len(old)}"


def test_positions_are_those_of_the_old_file(tmp_path: Path) -> None:
    nodes = rich_nodes()
    data = encode("0.0.3-2023-08-05", [*nodes, replace(nodes[0], deps=(4711,), id=60)])
    with pytest.raises(FormatError, match="ET006: data_deps names node 4711") as caught:
        read(tmp_path, data)
    whole = len(encode("0.0.3-2023-08-05", nodes))
    assert caught.value.position == f"node 60 at byte {whole}"


def test_malformed_old_messages_are_placed_to_the_byte(tmp_path: Path) -> None:
    good = encode("0.0.3-2023-08-05", rich_nodes())
    with pytest.raises(FormatError, match=r"ET001.*not UTF-8") as caught:
        read(tmp_path, good + framed(b"\x08\x07\x12\x02n\xff\x18\x04"))
    assert caught.value.position == f"byte {len(good) + 6}"


def test_a_collective_that_the_schema_lacks_is_refused(tmp_path: Path) -> None:
    made = classes("0.0.3-2023-08-07")
    node = made["Node"](id=1, name="n", type=7)
    node.attribute.add(name="comm_type", type=3, i=9)
    with pytest.raises(UnsupportedError, match="ET003"):
        read(tmp_path, framed(node.SerializeToString()))


@pytest.mark.parametrize("version", ["0.0.1", "0.0.3-2023-08-02"])
def test_gzip_and_folders_of_old_traces(tmp_path: Path, version: str) -> None:
    suffix = "eg" if version == "0.0.1" else "et"
    for folder, label, end in (("old", version, f"{suffix}.gz"), ("new", "0.0.4", "et")):
        (tmp_path / folder).mkdir()
        for rank in range(2):
            nodes = [node for node in graph_nodes() if node.kind not in ("SEND", "RECV")]
            nodes = [replace(node, deps=tuple(dep for dep in node.deps if dep < 6)) for node in nodes]
            data = encode(label, nodes)
            path = tmp_path / folder / f"job.{rank}.{end}"
            path.write_bytes(gzip.compress(data) if end.endswith("gz") else data)
    assert FORMAT.read is not None
    diagnostics = Diagnostics()
    old = FORMAT.read(tmp_path / "old", ReadOptions(), diagnostics)
    new = FORMAT.read(tmp_path / "new", ReadOptions(), Diagnostics())
    assert isinstance(old, Workload)
    assert isinstance(new, Workload)
    assert differences(old, new) == []
    assert old.num_ranks == 2
    assert len(old.classes) == 1
    assert diagnostics.counts()["chakra.migrated"] == 2


@pytest.mark.parametrize("version", ["0.0.1", "0.0.2", "0.0.3-2023-07-07", "0.0.3-2023-08-07"])
def test_a_checker_says_that_a_trace_is_old_and_checks_the_rest(tmp_path: Path, version: str) -> None:
    nodes = [replace(node, deps=(*node.deps, 5)) if node.id == 301 else node for node in graph_nodes()]
    path = tmp_path / "a.0.et"
    path.write_bytes(encode(version, [*nodes, replace(nodes[-1], id=300)]))
    found = check([path])
    errors = {entry.code for entry in found.violations if entry.severity is Severity.ERROR}
    assert {"ET003", "ET005"} <= errors
    told = next(entry for entry in found.violations if entry.code == "ET003")
    assert version.split("-", maxsplit=1)[0] in told.message
    assert "convert" in told.message


@pytest.mark.parametrize("version", OLD)
def test_old_traces_are_recognised_by_their_content(version: str) -> None:
    nodes = graph_nodes() if version == "0.0.1" else rich_nodes(version)
    assert FORMAT.sniff is not None
    assert FORMAT.sniff(Head(Path("x"), encode(version, nodes), ())) >= 50


def _written(workload: Workload, path: Path, version: str = "") -> bytes:
    assert FORMAT.write is not None
    FORMAT.write(workload, path, WriteOptions(version=version), Diagnostics())
    return path.read_bytes()


def _label_of(data: bytes) -> str:
    head = classes("0.0.4")["GlobalMetadata"].FromString(data[1 : 1 + data[0]])
    label: str = head.version
    return label


@pytest.mark.parametrize("version", [*OLD, "0.0.4"])
def test_any_version_is_written_as_either_of_today(tmp_path: Path, version: str) -> None:
    found, _ = read(tmp_path, encode(version, graph_nodes()))
    labels = {
        name: _label_of(_written(found, tmp_path / f"as-{name}-.et", name)) for name in ("", "0.0.4", "1.0.0")
    }
    assert labels == {"": "0.0.4", "0.0.4": "0.0.4", "1.0.0": "1.0.0"}
    again, diagnostics = read(tmp_path, (tmp_path / "as-0.0.4-.et").read_bytes())
    assert differences(again, found) == []
    assert diagnostics.counts() == {}


def test_a_label_is_kept_unless_another_is_named(tmp_path: Path) -> None:
    data = encode("0.0.4", rich_nodes(), label="1.0.0")
    found, _ = read(tmp_path, data)
    assert _written(found, tmp_path / "same.et") == data
    assert _written(found, tmp_path / "other.et", "0.0.4") == encode("0.0.4", rich_nodes())


@pytest.mark.parametrize("version", ["0.0.1", "0.0.3", "2.0"])
def test_older_versions_are_not_written(tmp_path: Path, version: str) -> None:
    found, _ = read(tmp_path, encode("0.0.4", rich_nodes()))
    with pytest.raises(UsageError, match=version) as caught:
        _written(found, tmp_path / "out.et", version)
    assert caught.value.hint
    assert not (tmp_path / "out.et").exists()


def test_declared_versions() -> None:
    assert {name for version in ALL for name in names_of(version)} == set(FORMAT.read_versions)
    assert FORMAT.write_versions == ("0.0.4", "1.0.0")


def test_a_trace_without_metadata_can_be_named(tmp_path: Path) -> None:
    made = classes("0.0.4")
    nodes = [made["Node"](id=i, name="n", type=4, attr=[{"name": "a", "bool_val": True}]) for i in (1, 2)]
    data = framed(*(node.SerializeToString() for node in nodes))
    with pytest.raises(FormatError, match=r"ET002.*not a GlobalMetadata.*ET003"):
        read(tmp_path, data)
    found, diagnostics = read(tmp_path, data, version="0.0.4")
    assert len(found.classes[0]) == 2
    assert diagnostics.counts()["ET002"] == 1
