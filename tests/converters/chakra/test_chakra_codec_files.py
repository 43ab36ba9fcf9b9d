"""Whole files: framing, gzip, damage, bombs, older schemas."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError


@pytest.fixture
def trace(reference: Any) -> bytes:
    nodes = [
        reference.node(
            id=i,
            name=f"op{i}",
            type=4,
            data_deps=[i - 1] if i else [],
            duration_micros=i * 1000,
            attr=[{"name": "is_cpu_op", "bool_val": False}, {"name": "num_ops", "int64_val": i << 30}],
        )
        for i in range(40)
    ]
    data: bytes = reference.file(*nodes)
    return data


def _read(path: Path, data: bytes, **options: Any) -> Any:
    path.write_bytes(data)
    return read_columns(path, Diagnostics(), ReadOptions(**options))


def test_truncation_anywhere_names_file_and_byte_or_keeps_whole_frames(tmp_path: Path, trace: bytes) -> None:
    path = tmp_path / "cut.et"
    whole = _read(path, trace)
    ends = [*whole.position.tolist()[1:], len(trace)]
    for size in random.Random(7).sample(range(len(trace)), 60):
        boundary = size in (*ends, int(whole.position[0]))
        if boundary and size > int(whole.position[0]):
            assert len(_read(path, trace[:size])) == ends.index(size) + 1
            continue
        with pytest.raises(FormatError) as caught:
            _read(path, trace[:size])
        assert caught.value.path == str(path)
        if not boundary and size:
            assert "ET001" in caught.value.message
            assert "byte" in (caught.value.position or "")
        kept = _read(path, trace[:size], lenient=True)
        assert len(kept) == sum(end <= size for end in ends)


def test_gzip_is_told_by_its_magic(tmp_path: Path, trace: bytes) -> None:
    assert len(_read(tmp_path / "packed.et", gzip.compress(trace))) == 40


@pytest.mark.parametrize("cut", [1, 8, 30])
def test_cut_gzip_is_an_error(tmp_path: Path, trace: bytes, cut: int) -> None:
    with pytest.raises(FormatError, match=r"ET001.*gzip"):
        _read(tmp_path / "cut.et.gz", gzip.compress(trace)[:-cut])


def test_gzip_bomb_is_refused(tmp_path: Path, trace: bytes) -> None:
    bomb = gzip.compress(trace + b"\x00" * 10_000_000)
    with pytest.raises(FormatError, match="zero padding"):
        _read(tmp_path / "bomb.et", bomb)
    with pytest.raises(FormatError, match="decompresses to more than 4,096 bytes"):
        _read(tmp_path / "limited.et", bomb, max_bytes=4096)


def test_length_bomb_is_refused_without_allocating(tmp_path: Path, trace: bytes) -> None:
    for length in (b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x7f", b"\xff" * 9 + b"\x01"):
        with pytest.raises(FormatError, match="ET001") as caught:
            _read(tmp_path / "bomb.et", trace + length + b"abc")
        assert caught.value.position == f"byte {len(trace)}"


def test_length_bomb_in_gzip(tmp_path: Path, trace: bytes) -> None:
    with pytest.raises(FormatError, match="cut off"):
        _read(tmp_path / "bomb.et", gzip.compress(trace + b"\xff\xff\xff\xff\x0f" + b"x" * 3_000_000))


def test_empty_frames_are_messages(tmp_path: Path, reference: Any) -> None:
    node = reference.node(id=3, name="n", attr=[{"name": "a", "bool_val": True}]).SerializeToString()
    diagnostics = Diagnostics()
    path = tmp_path / "empty.et"
    path.write_bytes(reference.framed(b"", b"", node, b""))
    assert read_columns(path, diagnostics).id.tolist() == [0, 3, 0]
    assert diagnostics.counts()["ET004"] == 3  # two frames and the missing version label


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x07\x0a\x050.0.4"])
def test_files_without_nodes_are_errors(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FormatError, match="ET002"):
        _read(tmp_path / "none.et", data)
    diagnostics = Diagnostics()
    assert len(read_columns(tmp_path / "none.et", diagnostics, ReadOptions(lenient=True))) == 0
    assert "ET002" in diagnostics.counts()


@pytest.mark.parametrize(
    "data", [b'{"a": 1}\n' * 20, bytes(range(256)) * 9, b"module @x {}\n", b"\x7fELF" * 9]
)
def test_junk_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FormatError, match=r"ET00[13]"):
        _read(tmp_path / "junk.et", data)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        read_columns(tmp_path / "absent.et", Diagnostics())


def test_missing_metadata_is_an_error_that_a_lenient_reader_gets_past(tmp_path: Path, reference: Any) -> None:
    node = reference.node(id=3, name="n", data_deps=[1], attr=[{"name": "a", "bool_val": True}])
    data = reference.framed(node.SerializeToString())
    with pytest.raises(FormatError, match=r"ET002.*not a GlobalMetadata"):
        _read(tmp_path / "bare.et", data)
    assert _read(tmp_path / "bare.et", data, lenient=True).id.tolist() == [3]


# A message of 0.0.3 by its field numbers and wire types (proto2: unpacked, explicit defaults), whose
# attribute has a truth value and declares a type that none of the revisions gives it.


def _sloppy_node() -> bytes:
    texts = b"".join(bytes([number << 3 | 2, 2]) + b"[]" for number in range(5, 11))
    attribute = b"\x0a\x09is_cpu_op" + b"\x10\x01" + b"\x20\x00"
    return b"\x08\x01\x12\x01a\x18\x05\x20\x00" + texts + b"\x5a" + bytes([len(attribute)]) + attribute


@pytest.mark.parametrize("metadata", [[], [b"\x0a\x0c\x0a\x06schema\x10\x08\x42\x00"]])
def test_attributes_that_contradict_their_declared_type_are_refused(
    tmp_path: Path, reference: Any, metadata: list[bytes]
) -> None:
    with pytest.raises(UnsupportedError, match=r"0\.0\.2 or 0\.0\.3"):
        _read(tmp_path / "old.et", reference.framed(*metadata, _sloppy_node(), _sloppy_node()))


def test_undecidable_schema_is_refused(tmp_path: Path, reference: Any) -> None:
    with pytest.raises(UnsupportedError, match="this file does not determine"):
        _read(
            tmp_path / "bare.et", reference.framed(b"\x08\x01\x12\x01a\x18\x03", b"\x08\x02\x12\x01b\x18\x03")
        )


def test_early_metadata_without_version(tmp_path: Path, reference: Any) -> None:
    attribute = reference.metadata(attr=[{"name": "schema", "string_val": "0.0.4"}]).SerializeToString()
    node = reference.node(id=3, name="n", data_deps=[1], attr=[{"name": "a", "bool_val": True}])
    data = reference.framed(b"\x0a" + attribute[1:], node.SerializeToString())
    columns = _read(tmp_path / "early.et", data)
    assert columns.metadata.keys == ("schema",)
    assert columns.metadata.payload.text(0) == "0.0.4"
    assert (columns.version, columns.schema) == ("0.0.4", "0.0.4-2023-10-10")


def test_columns_say_what_the_file_says(tmp_path: Path, trace: bytes) -> None:
    columns = _read(tmp_path / "a.et", trace)
    assert columns.version == "0.0.4"
    assert columns.attrs.keys == ("is_cpu_op", "num_ops")
    assert columns.attrs.field.tolist() == [27, 9] * 40
    np.testing.assert_array_equal(columns.attrs.bits[1::2], np.arange(40, dtype=np.uint64) << np.uint64(30))
    np.testing.assert_array_equal(columns.duration_micros, np.arange(40) * 1000)
    assert [columns.name.text(row) for row in (0, 39)] == ["op0", "op39"]
