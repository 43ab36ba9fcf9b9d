"""Damaged nodes of old schemas: read as the protobuf library reads them, or refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.chakra import FORMAT
from hespas.converters.format import ReadOptions
from hespas.graph import Diagnostics, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import FormatError, UnsupportedError
from tests.converters.chakra.historic_protos import (
    OLD_VERSIONS,
    Logical,
    classes,
    encode,
    framed,
    graph_nodes,
    rich_nodes,
)

_SETTINGS = settings(max_examples=60)


def _nodes(version: str) -> list[Logical]:
    nodes = graph_nodes() if version == "0.0.1" else rich_nodes(version)
    return [replace(node, deps=()) for node in nodes]


def _read(folder: Path, data: bytes, *, lenient: bool = False, version: str = "") -> Workload:
    assert FORMAT.read is not None
    (folder / "a.et").write_bytes(data)
    value = FORMAT.read(folder / "a.et", ReadOptions(lenient=lenient, version=version), Diagnostics())
    assert isinstance(value, Workload)
    return value


def _damaged(message: bytes, chance: random.Random) -> bytes:
    data = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(data))] = chance.choice([0, 1, 2, 0x80, 0xFF, chance.randrange(256)])
    return bytes(data)


def _parsed(made: Any, message: bytes) -> Any | None:
    """The message as the library reads it, without unknown fields; None where it does not."""
    try:
        parsed = made.FromString(message)
    except DecodeError:
        return None
    parsed.DiscardUnknownFields()
    return parsed if parsed.IsInitialized() else None


@pytest.mark.parametrize("version", OLD_VERSIONS)
@_SETTINGS
@given(place=st.integers(0, 20), seed=st.integers(0, 1 << 32), lenient=st.booleans())
def test_damaged_nodes_are_read_right_or_refused(
    tmp_path: Path, version: str, place: int, seed: int, lenient: bool
) -> None:
    nodes = _nodes(version)
    made = classes(version)["Node"]
    victim = replace(nodes[place % len(nodes)], id=999)
    whole = encode(version, [victim])
    message = _damaged(whole[1 if len(whole) < 129 else 2 :], random.Random(seed))
    good = encode(version, nodes)
    try:
        found = _read(tmp_path, good + framed(message), lenient=lenient, version=version)
    except (FormatError, UnsupportedError):
        return
    parsed = _parsed(made, message)
    if parsed is None:
        assert lenient
        assert len(found.classes[0]) == len(nodes)
    elif len(found.classes[0]) > len(nodes):
        again = _read(tmp_path, good + framed(parsed.SerializeToString()), lenient=True, version=version)
        assert [str(entry) for entry in workloads_equal(found, again)] == []


@pytest.mark.parametrize("version", OLD_VERSIONS)
@pytest.mark.parametrize(
    "message",
    [
        b"\x08\x01",
        b"\x12\x01a\x18\x01",
        b"\x08\x01\x12\x01a\x18\x63",
        b"\x08\x01\x12\x01a\x18\x01\xf8\x07\x05",
        b"\x08\x01\x12\x01a\x18\x01\x22\x01\x80",
        b"\x08\x01\x12\x01\xff\x18\x01",
        b"\x0b\x0c",
    ],
)
def test_nodes_that_lack_or_have_what_their_schema_does_not_say(
    tmp_path: Path, version: str, message: bytes
) -> None:
    good = encode(version, _nodes(version))
    with pytest.raises((FormatError, UnsupportedError), match=r"ET00[13]") as caught:
        _read(tmp_path, good + framed(message), version=version)
    place = int((caught.value.position or "").rpartition("byte ")[2])
    assert len(good) <= place <= len(good) + len(message) + 1
