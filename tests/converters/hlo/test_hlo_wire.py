"""Ids in a serialised module are checked first, because XLA allocates memory up to the largest id."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters import ReadOptions, load_format
from hespas.converters.hlo.scan import largest_local_id
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError

PROTO = Path(__file__).parents[3] / "fixtures" / "binary" / "llama_fsdp_tp_global_N8.hlo.pb.gz"


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _module(*ids: int) -> bytes:
    instructions = b"".join(_field(2, _varint(35 << 3) + _varint(number)) for number in ids)
    return _field(1, b"name") + _field(3, instructions)


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1))
def test_the_largest_id_is_that_of_the_low_half(ids: list[int]) -> None:
    assert largest_local_id(_module(*ids)) == max(number & 0xFFFFFFFF for number in ids)


def test_a_real_module_has_ids_no_larger_than_it() -> None:
    data = gzip.decompress(PROTO.read_bytes())
    assert 0 < largest_local_id(data) < len(data)


@given(st.binary(max_size=64))
def test_any_bytes_have_an_answer(data: bytes) -> None:
    with suppress(ValueError):
        assert largest_local_id(data) >= -1


@pytest.mark.parametrize("data", [_module(1 << 30), _module(1)[:-1], b"\xff" * 20])
def test_damaged_modules_are_refused_before_memory_is_reserved(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "module.pb"
    path.write_bytes(data)
    read = load_format("hlo").read
    assert read is not None
    with pytest.raises(FormatError, match="HloModuleProto"):
        read(path, ReadOptions(), Diagnostics())


def test_what_ends_xla_is_a_message(tmp_path: Path) -> None:
    data = bytearray(gzip.decompress(PROTO.read_bytes()))
    data[195623], data[307863] = 46, 29  # found by fuzzing: a signal in XLA
    path = tmp_path / "module.pb"
    path.write_bytes(data)
    read = load_format("hlo").read
    assert read is not None
    # What the damage does depends on what lies in memory: a signal or words of XLA, which are the child's, or
    # a text whose shapes contradict each other.
    with pytest.raises(
        FormatError, match=r"expected a serialised HloModuleProto: |module printed as text, line"
    ):
        read(path, ReadOptions(), Diagnostics())
