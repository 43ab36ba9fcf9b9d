"""Detection of schema versions by structure or name; no version is read as another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import Workload
from hespas.graph.errors import FormatError, HespasError, UnsupportedError
from tests.converters.chakra.historic_protos import (
    Logical,
    classes,
    encode,
    framed,
    graph_nodes,
    rich_nodes,
)
from tests.converters.chakra.version_support import ALL, OLD, differences, names_of, read, without_label


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("name", ["0.0.1", "0.0.2", "0.0.3", *ALL[2:], "1.0.0"])
def test_naming_a_version_is_right_or_refused(tmp_path: Path, version: str, name: str) -> None:
    """All pairs, for a program that tells its version; revisions that read it alike stand for each other."""
    nodes = graph_nodes() if version == "0.0.1" else rich_nodes(version)
    today, _ = read(tmp_path, encode("0.0.4", nodes))
    data = encode(version, nodes)
    if name in names_of(version):
        assert differences(read(tmp_path, data, version=name)[0], today) == []
        return
    found = _attempt(tmp_path, data, name)
    if not isinstance(found, Workload):
        assert isinstance(found, UnsupportedError)
        assert found.message.startswith("ET003")
        assert found.hint
        return
    assert differences(found, today) == []
    assert {name, version} < {label for label in OLD if label.startswith("0.0.3-")}


_TEXT = st.text(max_size=6)
_NUMBER = st.sampled_from([0, 1, 5, 127, 128, 300, (1 << 31) - 1])
_CONTRACT: dict[str, st.SearchStrategy[Any]] = {
    "comm_size": _NUMBER,
    "comm_tag": _NUMBER,
    "num_ops": _NUMBER,
    "tensor_size": _NUMBER,
    "involved_dim": st.lists(st.booleans(), min_size=1, max_size=3),
}
_COMM = st.sampled_from(["ALL_REDUCE", "ALL_TO_ALL", "ALL_GATHER", "REDUCE_SCATTER"])
_FREE: dict[str, st.SearchStrategy[Any]] = {
    "is_cpu_op": st.booleans(),
    "rf_id": st.integers(-(1 << 63), (1 << 63) - 1) | _NUMBER,
    "text": _TEXT,
    "scale": st.sampled_from([0.0, 0.5, -1e9]),
    "ints": st.lists(st.integers(-3, 300), min_size=1, max_size=3),
    "floats": st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=2),
    "labels": st.lists(_TEXT, min_size=1, max_size=3),
}
_KINDS = ["INVALID", "MEM_LOAD", "MEM_STORE", "COMP", "SEND", "RECV", "COLL"]


@st.composite
def _programs(draw: st.DrawFn, version: str) -> list[Logical]:
    """Programs with few fields, so that many do not tell their version, and some with all."""
    free = {} if version == "0.0.1" else _FREE
    strategies: dict[str, st.SearchStrategy[Any]] = _CONTRACT | free
    known = draw(st.lists(st.sampled_from([*_CONTRACT, *free]), unique=True, max_size=3))
    if version == "0.0.1":  # which has no order of attributes; theirs is that of the contract
        known = [name for name in _CONTRACT if name in known]
    nodes: list[Logical] = []
    first = draw(st.sampled_from([0, 1, 300]))
    for place in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(_KINDS))
        if version.startswith("0.0.3-") and draw(st.integers(0, 9)) == 0:
            kind = "METADATA"
        attrs: dict[str, Any] = {}
        if kind == "COLL" and draw(st.booleans()):
            attrs["comm_type"] = draw(_COMM)
        attrs |= {name: draw(strategies[name]) for name in known if draw(st.booleans())}
        deps = tuple(node.id for node in nodes if draw(st.booleans()))
        texts = tuple(draw(st.lists(_TEXT, max_size=6))) if version != "0.0.1" and draw(st.booleans()) else ()
        micros = draw(st.sampled_from([0, 0, 7]))
        nodes.append(Logical(first + place, draw(_TEXT.filter(bool)), kind, deps, micros, attrs, texts))
    return nodes


_SETTINGS = settings(max_examples=8)


@pytest.mark.parametrize("version", ALL)
@_SETTINGS
@given(data=st.data())
def test_no_version_is_misread(tmp_path: Path, version: str, data: st.DataObject) -> None:
    """Unnamed, a file is read right or refused; named as what it is, it is read right; named as another, it
    is refused or read right, unless nothing in it tells, when the name is all there is.
    """
    nodes = data.draw(_programs(version))
    has_metadata = data.draw(st.booleans())
    encoded = encode(version, nodes, {} if has_metadata else None, label="")
    today = replace(read(tmp_path, encode("0.0.4", nodes))[0], metadata={})
    told = _attempt(tmp_path, encoded, "")
    if isinstance(told, Workload):
        assert without_label(told, today) == []
    for name in ("0.0.1", "0.0.2", "0.0.3", *ALL[2:], "1.0.0"):
        found = _attempt(tmp_path, encoded, name)
        own = name in names_of(version)
        if isinstance(found, Workload) and (own or isinstance(told, Workload)):
            assert without_label(found, today) == [], name
        if own and name != "0.0.3":
            assert isinstance(found, Workload), (name, str(found))


def _attempt(folder: Path, data: bytes, name: str) -> Workload | HespasError:
    """Return the workload, or the error if the schema is rejected or the file does not fit it."""
    try:
        return read(folder, data, version=name)[0]
    except (UnsupportedError, FormatError) as error:
        return error


def _bare(version: str, kind: str, **more: Any) -> bytes:
    return encode(version, [Logical(1, "a", kind, **more)])


@pytest.mark.parametrize(
    ("data", "may_be"),
    [
        (_bare("0.0.2", "COMP"), "0.0.1 or 0.0.2 or 0.0.3 or 0.0.4"),
        (_bare("0.0.3-2023-07-07", "COMP", texts=("[]",) * 6), "0.0.2 or 0.0.3"),
        (_bare("0.0.1", "COMP", attrs={"tensor_size": 5}), "0.0.1 or 0.0.4"),
        (b"\x00" + framed(b"\x08\x01\x12\x01a\x18\x04\x22\x01\x01"), "0.0.3 or 0.0.4"),
        (b"\x00" + framed(b"\x08\x01\x12\x01a\x18\x04\x2a\x01\x01"), "0.0.3 or 0.0.4"),
    ],
)
def test_what_nothing_tells_is_refused_with_all_that_it_may_be(
    tmp_path: Path, data: bytes, may_be: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"ET003.*it may be {may_be}\n") as caught:
        read(tmp_path, data)
    assert "`source_version" in (caught.value.hint or "")
    assert caught.value.path == str(tmp_path / "a.et")


def test_a_name_settles_what_nothing_tells(tmp_path: Path) -> None:
    data = _bare("0.0.2", "COMP")
    kinds = {
        name: read(tmp_path, data, version=name)[0].classes[0].kind.tolist() for name in ("0.0.2", "0.0.3")
    }
    assert kinds["0.0.2"] != kinds["0.0.3"]
    assert read(tmp_path, data, version="0.0.2")[0].metadata["version"] == "0.0.2"


def test_the_telling_field_may_come_last(tmp_path: Path) -> None:
    """Behind the first batch of frames, and for the meaning of all before it."""
    nodes = [Logical(number, "x" * 60, "COMP", attrs={"rf_id": number}) for number in range(1, 20_000)]
    last = Logical(30_000, "y", "COMP", attrs={"op": "mm"})
    today, _ = read(tmp_path, encode("0.0.4", [*nodes, last]))
    for version in ("0.0.3-2023-07-07", "0.0.3-2023-08-05"):
        found, _ = read(tmp_path, encode(version, [*nodes, last]))
        assert differences(found, today) == []


def test_a_broadcast_tells_the_last_revision(tmp_path: Path) -> None:
    nodes = rich_nodes("0.0.3-2023-08-07")
    data = encode("0.0.3-2023-08-07", nodes)
    assert read(tmp_path, data)[0].metadata["version"] == "0.0.3-2023-08-07"
    with pytest.raises(UnsupportedError, match="ET003"):
        read(tmp_path, data, version="0.0.3-2023-08-05")


@pytest.mark.parametrize("label", ["0.0.1", "0.0.3", "1.0.0", "9.9", ""])
def test_a_label_that_lies_changes_nothing(tmp_path: Path, label: str) -> None:
    today, _ = read(tmp_path, encode("0.0.4", rich_nodes()))
    found, _ = read(tmp_path, encode("0.0.4", rich_nodes(), label=label))
    assert without_label(found, today) == []


def test_an_attribute_that_lies_changes_nothing(tmp_path: Path) -> None:
    metadata = {"version": "1.0.0", "schema": "0.0.4"}
    found, _ = read(tmp_path, encode("0.0.3-2023-08-05", rich_nodes(), metadata))
    assert found.metadata["version"] == "0.0.3"
    assert found.classes[0].data_deps.values.tolist() == [0, 0, 1]


def _head(label: str) -> bytes:
    return framed(classes("0.0.4")["GlobalMetadata"](version=label).SerializeToString())


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("label", ["0.0.4", "0.0.3"])
def test_nodes_under_the_metadata_of_another_schema_are_refused(
    tmp_path: Path, version: str, label: str
) -> None:
    nodes = graph_nodes() if version == "0.0.1" else rich_nodes(version)
    with pytest.raises(UnsupportedError, match="ET003"):
        read(tmp_path, _head(label) + encode(version, nodes))


@pytest.mark.parametrize("unknown", [b"\x98\x06\x01", b"\x1a\x01x", b"\x20\x07"], ids=["99", "text", "4"])
def test_unknown_fields_of_the_metadata_are_skipped(tmp_path: Path, unknown: bytes) -> None:
    today, _ = read(tmp_path, encode("0.0.4", graph_nodes()))
    frames = encode("0.0.4", graph_nodes())
    metadata = frames[1 : frames[0] + 1] + unknown
    changed = bytes((len(metadata),)) + metadata + frames[frames[0] + 1 :]
    assert differences(read(tmp_path, changed)[0], today) == []
