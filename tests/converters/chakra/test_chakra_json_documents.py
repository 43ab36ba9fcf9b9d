"""Output of chakra_jsonizer, compared with the protobuf library that prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from hespas.converters import ReadOptions, sniff
from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.json import JsonFrames
from hespas.converters.chakra.json.files import read_chakra_json
from hespas.converters.chakra.reader import read_chakra
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.chakra.wire.decode import TraceSource, open_trace
from hespas.graph import Diagnostics, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError, UnsupportedError

_PRINT: Any = json_format.MessageToJson


def _node(reference: Any, number: int, **fields: Any) -> Any:
    return reference.node(id=number, name=f"op {number}", type=4, **fields)


def _with_every_type(reference: Any) -> Any:
    """A node with an attribute of each type, at its extremes."""
    node = _node(reference, (1 << 64) - 1, duration_micros=(1 << 64) - 1, data_deps=[0, 7], ctrl_deps=[7])
    node.inputs.values, node.outputs.shapes = "[1, 'ä\\n\"']", "[[]]"
    values: dict[str, Any] = {
        "double": [0.1, float("nan"), float("inf"), -0.0, 5e-324],
        "float": [0.5, float("-inf"), 1.1754943508222875e-38],
        "bool": [True, False],
        "string": ["", "\u00e9\U0001f600\\"],
        "bytes": [b"", b"\xff\xfe\x00\x01"],
        **{name: [-(1 << 31), -1, 0, (1 << 31) - 1] for name in ("int32", "sint32", "sfixed32")},
        **{name: [-(1 << 63), -1, 0, (1 << 63) - 1] for name in ("int64", "sint64", "sfixed64")},
        **{name: [0, (1 << 32) - 1] for name in ("uint32", "fixed32")},
        **{name: [0, (1 << 64) - 1] for name in ("uint64", "fixed64")},
    }
    for kind, entries in values.items():
        for place, entry in enumerate(entries):
            node.attr.add(name=f"{kind}{place}", **{f"{kind}_val": entry})
        getattr(node.attr.add(name=f"{kind}s", doc_string="all"), f"{kind}_list").values.extend(entries)
    node.attr.add(name="nothing")
    node.attr.add(name="empty").int64_list.SetInParent()
    return node


def _metadata(reference: Any) -> Any:
    metadata = reference.metadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val="1.1.1-chakra.0.0.4")
    metadata.attr.add(name="pid", uint64_val=7)
    return metadata


@pytest.mark.parametrize("snake", [False, True])
@pytest.mark.parametrize("indent", [2, None])
def test_printed_documents_become_the_messages_they_were(
    reference: Any, tmp_path: Path, snake: bool, indent: int | None
) -> None:
    messages = [_metadata(reference), _node(reference, 0), _node(reference, 7), _with_every_type(reference)]
    text = "".join(
        _PRINT(message, indent=indent, preserving_proto_field_name=snake) + "\n" for message in messages
    )
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    found = [m.data for m in JsonFrames(path, faults_of(path), max_bytes=None).messages()]
    assert found == [message.SerializeToString(deterministic=True) for message in messages]


def faults_of(path: Path) -> Faults:
    return Faults(str(path), None, Diagnostics(), lenient=False)


def _job(reference: Any, folder: Path) -> tuple[Path, Path]:
    """The same two ranks as traces and as printed documents."""
    binary, printed = folder / "binary", folder / "printed"
    for made in (binary, printed):
        made.mkdir()
        (made / "comm_group.json").write_text('{"1": [0, 1]}')
    for rank in range(2):
        nodes = [_node(reference, 0, duration_micros=3), _node(reference, 1, data_deps=[0])]
        collective = reference.node(id=5, name="sum", type=7, data_deps=[1])
        collective.attr.add(name="comm_type", int64_val=0)
        collective.attr.add(name="comm_size", int64_val=1 << 20)
        collective.attr.add(name="pg_name", string_val="1")
        nodes.append(collective)
        (binary / f"w.{rank}.et").write_bytes(reference.file(*nodes))
        messages = [reference.metadata(version="0.0.4"), *nodes]
        (printed / f"w.{rank}.json").write_text("\n".join(map(_PRINT, messages)))
    return binary, printed


def _read(path: Path, **options: Any) -> Workload:
    return read_chakra_json(path, ReadOptions(**options), Diagnostics())


def test_a_folder_of_documents_is_the_job_of_its_traces(reference: Any, tmp_path: Path) -> None:
    binary, printed = _job(reference, tmp_path)
    expected = read_chakra(binary, ReadOptions(), Diagnostics())
    found = _read(printed)
    assert found.metadata["format"] == "chakra-json"
    assert len(found.classes) == 1
    assert found.num_ranks == 2
    assert [difference.column for difference in workloads_equal(expected, found)] == ["metadata"]
    assert sniff(printed).name == "chakra-json"
    assert sniff(printed / "w.0.json").name == "chakra-json"
    assert sniff(binary).name == "chakra"


@pytest.mark.parametrize(
    "text",
    [
        '{"version": "0.0.4"}{"id": "1", "name": "a", "type": "COMP_NODE", "durationMicros": NaN}',
        '{"version": "0.0.4"}{"name": "\\ud800", "type": "COMM_COLL_NODE"}',
        '{"name": "a", "id": "1", "type": "COMP_NODE"}{"name": "b", "id": "2", "type": "COMP_NODE"}',
    ],
)
def test_damaged_documents_are_told_too(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.0.json"
    path.write_text(text)
    assert sniff(path).name == "chakra-json"
    with pytest.raises(FormatError, match=r"ET00[12]"):
        _read(path)


def test_packed_documents_are_read(reference: Any, tmp_path: Path) -> None:
    import gzip

    _, printed = _job(reference, tmp_path)
    packed = printed / "w.1.json.gz"
    packed.write_bytes(gzip.compress((printed / "w.1.json").read_bytes(), mtime=0))
    assert sniff(packed).name == "chakra-json"
    found = _read(packed)
    assert found.metadata["rank"] == "1"
    assert len(found.classes[0]) == 3


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ('{"id": "1", "name": 5}', "name: 5 is not a text"),
        ('{"id": "-1"}', "id: '-1' does not fit uint64"),
        ('{"id": 1.5}', "id: 1.5 is not a whole number"),
        ('{"id": "18446744073709551616"}', "does not fit uint64"),
        ('{"id": true}', "id: True is not a whole number"),
        ('{"id": NaN}', "malformed"),
        ('{"type": "NODE"}', "type: 'NODE' is not a node type"),
        ('{"dataDeps": 3}', "dataDeps: not a list"),
        ('{"dataDeps": ["0", null]}', r"dataDeps\[1\]: None is not a whole number"),
        ('{"dataDeps": [], "data_deps": []}', "two spellings"),
        ('{"inputs": []}', "inputs: IOInfo must be an object"),
        (
            '{"attr": [{"name": "a", "int64Val": "1", "boolVal": true}]}',
            r"attr\[0\]: boolVal: the attribute already has a value",
        ),
        ('{"attr": [{"name": "a", "boolVal": 1}]}', "neither true nor false"),
        ('{"attr": [{"name": "a", "floatVal": 1e39}]}', "does not fit a float"),
        ('{"attr": [{"name": "a", "doubleVal": "nan"}]}', "is not a number"),
        ('{"attr": [{"name": "a", "bytesVal": "?"}]}', "not base64"),
        ('{"name": "\ud800"}', "malformed"),
    ],
)
def test_wrong_values_are_refused_with_document_and_line(tmp_path: Path, node: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        f'{{"version": "0.0.4"}}\n{{"id": "7", "name": "good", "type": "COMP_NODE"}}\n\n{node}\n',
        encoding="utf-8",
        errors="surrogatepass",
    )
    expected = message if "\ud800" not in node else ".*"
    with pytest.raises(FormatError, match=expected) as caught:
        _read(path)
    assert caught.value.path == str(path)
    assert (caught.value.position or "").endswith("document 3, line 4")


def test_structural_faults_name_the_node_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    head = '{"version": "0.0.4"}\n'
    path.write_text(head + '{"id": 3, "name": "a", "type": 4}\n{"id": 3, "name": "b", "type": 4}\n')
    with pytest.raises(FormatError, match="ET005") as caught:
        _read(path)
    assert caught.value.path == str(path)
    assert caught.value.position == "node 3 at line 3"
    path.write_text(head + '{\n"id": 4, "name": "a", "type": 4, "dataDeps": [9]}')
    with pytest.raises(FormatError, match=r"ET006.*node 9") as caught:
        _read(path)
    assert caught.value.position == "node 4 at line 2"
    found = Diagnostics()
    read_chakra_json(path, ReadOptions(lenient=True), found)
    told = next(finding for finding in found if finding.code == "ET006")
    assert (told.location, told.path, told.node) == ("node 4 at line 2", str(path), 4)


def test_a_cut_file_is_refused_and_can_be_recovered(reference: Any, tmp_path: Path) -> None:
    _, printed = _job(reference, tmp_path)
    whole = (printed / "w.0.json").read_bytes()
    path = tmp_path / "cut.json"
    for length in range(len(whole) - 2, 30, -7):
        path.write_bytes(whole[:length])
        if whole[:length].rstrip().endswith(b"\n}"):
            continue
        with pytest.raises(FormatError, match=r"cut off|ET002") as caught:
            _read(path)
        assert caught.value.path == str(path)
    path.write_bytes(whole[:-3])
    with pytest.raises(FormatError, match="document 4 is cut off") as caught:
        _read(path)
    assert "`recover` keeps what is before the cut (nodes: 2)" in str(caught.value)
    found = Diagnostics()
    workload = read_chakra_json(path, ReadOptions(recover=True), found)
    assert len(workload.classes[0]) == 2
    assert found.counts()["ET001"] == 1


def test_documents_without_metadata_and_of_old_schemas_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    node = '{"id": 1, "name": "a", "type": "COMP_NODE"}'
    path.write_text(node)
    with pytest.raises(FormatError, match="ET002: the first document is a node"):
        _read(path)
    assert len(_read(path, lenient=True).classes[0]) == 1
    path.write_text('{"version": "0.0.4"}{"id": 1, "name": "a", "type": "COMP_NODE", "parent": ["0"]}')
    with pytest.raises(UnsupportedError, match="ET003: parent"):
        _read(path)
    path.write_text('{"version": "0.0.4"}')
    with pytest.raises(FormatError, match="ET002: the file has no node"):
        _read(path)


def test_unknown_fields_are_counted_and_wrong_nodes_left_out_where_lenient(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '{"version": "0.0.4"} {"id": 1, "name": "a", "type": 4, "x": 1} {"id": 2, "name": 3, "type": 4}'
    )
    found = Diagnostics()
    workload = read_chakra_json(path, ReadOptions(lenient=True), found)
    assert len(workload.classes[0]) == 1
    assert found.counts()["chakra.unknown-field"] == 1
    assert found.counts()["ET001"] == 1


@pytest.mark.parametrize("text", ["{}]", "}", "[1]", "{} 5", '{"version": "0.0.4"},{"id": 1}', "{]"])
def test_text_that_is_no_row_of_objects_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="ET00"):
        _read(path)


def test_depth_and_size_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"version": "0.0.4"}' + '{"a":' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(FormatError, match="nested too deep"):
        _read(path)
    path.write_text('{"version": "0.0.4"}' + "{}" * 100_000)
    with pytest.raises(FormatError, match="zero padding"):
        _read(path)


def test_blocks_of_any_size_give_the_same_nodes(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [
        _metadata(reference),
        *(_node(reference, number, data_deps=[0] * number) for number in range(40)),
    ]
    messages.append(_with_every_type(reference))
    path = tmp_path / "trace.json"
    path.write_text("".join(map(_PRINT, messages)), encoding="utf-8")
    expected = [message.SerializeToString(deterministic=True) for message in messages]
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("hespas.converters.chakra.json._BLOCK_BYTES", size)
        found = JsonFrames(path, faults_of(path), max_bytes=None).messages()
        assert [message.data for message in found] == expected


def test_columns_of_both_kinds_of_file_agree(reference: Any, tmp_path: Path) -> None:
    binary, printed = _job(reference, tmp_path)
    columns = read_columns(binary / "w.0.et", Diagnostics())
    found = _read(printed / "w.0.json").classes[0]
    assert found.id.tolist() == columns.id.tolist()
    assert found.duration_ns[0] == 3000


def test_a_file_is_closed_when_its_messages_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[TraceSource] = []

    def open_recorded(path: Path, max_bytes: int | None) -> TraceSource:
        opened.append(open_trace(path, max_bytes))
        return opened[-1]

    def refuse(_batch: object, _path: str) -> None:
        raise FormatError("refused")

    monkeypatch.setattr("hespas.converters.chakra.json.open_trace", open_recorded)
    monkeypatch.setattr("hespas.converters.chakra.json.files.refuse_crowded", refuse)
    monkeypatch.setattr("hespas.converters.chakra.json.files._BATCH_BYTES", 1)
    path = tmp_path / "job.json"
    path.write_text('{"workload_graph":[{"Id":1,"NodeType":4},{"Id":2,"NodeType":4}]}')
    with pytest.raises(FormatError, match="refused") as caught:  # its traceback holds the readers' frames
        read_chakra_json(path, ReadOptions(), Diagnostics())
    assert caught.tb is not None
    with pytest.raises(ValueError, match="closed"):
        opened[0].stream.read(1)
