"""The protobuf library as a reference, and the codec of Hespas on byte strings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hespas.converters.chakra.wire import EtColumns
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.chakra.wire.encode import encode_metadata, encode_nodes
from hespas.converters.format import ReadOptions
from hespas.graph.diagnostics import Diagnostics
from tests.chakra_messages import reference_messages


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _framed(*messages: bytes) -> bytes:
    return b"".join(_varint(len(message)) + message for message in messages)


def messages_of(data: bytes) -> Iterator[bytes]:
    """The messages of a file, metadata first."""
    at = 0
    while at < len(data):
        length = shift = 0
        while data[at] > 0x7F:
            length |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        length |= data[at] << shift
        yield data[at + 1 : at + 1 + length]
        at += 1 + length


@dataclass(frozen=True, slots=True)
class Reference:
    """Message classes of the protobuf library; their fields are known at run time only, hence ``Any``."""

    node: Any
    metadata: Any

    @staticmethod
    def framed(*messages: bytes) -> bytes:
        return _framed(*messages)

    def file(self, *nodes: Any, version: str = "0.0.4") -> bytes:
        head = self.metadata(version=version).SerializeToString()
        return _framed(head, *(node.SerializeToString() for node in nodes))


@pytest.fixture(scope="session")
def reference() -> Reference:
    messages = reference_messages()
    return Reference(messages.node, messages.metadata)


@dataclass(frozen=True, slots=True)
class Codec:
    """The codec of Hespas on byte strings."""

    path: Path

    def decode(
        self,
        data: bytes,
        diagnostics: Diagnostics | None = None,
        *,
        lenient: bool = False,
        version: str = "",
    ) -> EtColumns:
        self.path.write_bytes(data)
        found = Diagnostics() if diagnostics is None else diagnostics
        return read_columns(self.path, found, ReadOptions(lenient=lenient, version=version))

    def encode(self, columns: EtColumns) -> bytes:
        return encode_metadata(columns).tobytes() + encode_nodes(columns).tobytes()


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec(tmp_path_factory.mktemp("codec") / "trace.et")
