"""The schema file for readers and the tables of the codec are equal."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from hespas.files.wire import tag
from hespas.schemas.chakra import READ_VERSIONS
from hespas.schemas.chakra.tables import (
    ATTRIBUTE,
    GLOBAL_METADATA,
    IO_INFO,
    NAMED,
    NODE,
    VERSIONS,
    AttributeField,
    CollectiveCommType,
    FieldSpec,
    MessageSpec,
    NodeField,
    NodeType,
    ProtoKind,
    WireType,
)
from tests.converters.chakra.historic_protos import OLD_VERSIONS

_PROTO = files("hespas.schemas.chakra").joinpath("et_def.proto").read_text(encoding="utf-8")


def _blocks(keyword: str) -> dict[str, str]:
    found = re.findall(
        rf"^{keyword} (\w+) \{{(.*?)\}}\n(?=\n|$|message|enum)", _PROTO, re.MULTILINE | re.DOTALL
    )
    return dict(found)


def _type_name(field: FieldSpec) -> str:
    if field.message is not None:
        return field.message.name
    return "NodeType" if field.kind is ProtoKind.ENUM else field.kind.proto


def _declared(spec: MessageSpec) -> set[tuple[str, str, int, bool]]:
    return {(_type_name(field), field.name, field.number, field.repeated) for field in spec.fields.values()}


def _messages() -> dict[str, MessageSpec]:
    lists = [field.message for field in ATTRIBUTE.fields.values() if field.message is not None]
    return {spec.name: spec for spec in (ATTRIBUTE, GLOBAL_METADATA, IO_INFO, NODE, *lists)}


def test_messages_agree() -> None:
    blocks = _blocks("message")
    assert set(blocks) == set(_messages())
    for name, spec in _messages().items():
        fields = re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", blocks[name])
        written = {(kind, field, int(number), bool(repeated)) for repeated, kind, field, number in fields}
        assert written == _declared(spec)


def test_enumerations_agree() -> None:
    blocks = _blocks("enum")
    for name, enumeration, suffix in (
        ("NodeType", NodeType, "_NODE"),
        ("CollectiveCommType", CollectiveCommType, ""),
    ):
        written = {key: int(value) for key, value in re.findall(r"(\w+) = (\d+);", blocks[name])}
        assert written == {member.name + suffix: int(member) for member in enumeration}


def test_numbers_agree_with_the_enumerations() -> None:
    assert {field.name.upper(): number for number, field in NODE.fields.items()} == {
        member.name: int(member) for member in NodeField
    }
    assert set(ATTRIBUTE.fields) == {int(member) for member in AttributeField if member}
    assert ATTRIBUTE.fields[AttributeField.BOOL_LIST].name == "bool_list"


def test_tags() -> None:
    assert tag(1, WireType.VARINT) == b"\x08"
    assert tag(27, WireType.VARINT) == b"\xd8\x01"
    assert tag(32, WireType.BYTES) == b"\x82\x02"


_KINDS: dict[str, str] = {
    "MemoryType": "enum",
    "NodeType": "enum",
    "CommType": "enum",
    "AttributeType": "enum",
}
_Field = tuple[int, str, str, bool, bool]


def _historic(spec: MessageSpec) -> set[_Field]:
    return {
        (
            field.number,
            field.name,
            field.message.name if field.message else field.kind.proto,
            field.repeated,
            field.required,
        )
        for field in spec.fields.values()
    }


def _by_hand(text: str) -> set[_Field]:
    fields: list[tuple[str, str, str, str]] = re.findall(r"(\d+)([!*]?) (\w+) (\w+)", text)
    return {
        (int(number), name, _KINDS.get(kind, kind), mark == "*", mark == "!")
        for number, mark, kind, name in fields
    }


@pytest.mark.parametrize("label", OLD_VERSIONS)
def test_the_history_says_what_the_old_schemas_said(label: str) -> None:
    version, proto = VERSIONS[label], OLD_VERSIONS[label]
    assert _historic(version.node) == _by_hand(proto.messages["Node"])
    assert (version.metadata is not None) == proto.has_metadata
    attribute = version.node.fields[11].message
    if attribute is not None:
        text = proto.messages["AttributeProto"].replace("* string strings", "* bytes strings")
        assert _historic(attribute) == _by_hand(text)
    assert [entry.field.name for entry in version.declared] == list(proto.attribute_types)
    today = {"SEND": "COMM_SEND", "RECV": "COMM_RECV", "COLL": "COMM_COLL"}
    assert [NodeType(number).name for number in version.node_types] == [
        today.get(name, name) for name in proto.node_types
    ]
    assert ["-" if number < 0 else CollectiveCommType(number).name for number in version.comm_types] == list(
        proto.comm_types
    )


def test_the_labels_that_cost_nothing_are_those_of_the_table() -> None:
    assert tuple(NAMED) == READ_VERSIONS
