"""Input bytes: gzip told by magic, bounded, truncation found."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from hespas.files.limits import VARIABLE, Limits, limits
from hespas.files.source import read_bytes, read_document
from hespas.graph.errors import FormatError, UsageError

LIMIT = 1 << 30


def _write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "input"
    path.write_bytes(data)
    return path


def test_plain_and_gzipped_and_multi_member_content_is_the_same(tmp_path: Path) -> None:
    noise = random.Random(7).randbytes(3_000_000)
    data = noise + b"a" * 2_000_000
    assert read_bytes(_write(tmp_path, data), LIMIT) == data
    assert read_bytes(_write(tmp_path, gzip.compress(data)), LIMIT) == data
    members = gzip.compress(noise) + gzip.compress(b"") + gzip.compress(b"a" * 2_000_000)
    assert read_bytes(_write(tmp_path, members), LIMIT) == data


def test_every_truncation_of_a_gzip_file_is_found(tmp_path: Path) -> None:
    whole = gzip.compress(random.Random(7).randbytes(2_000))
    for length in (2, 5, 12, len(whole) // 2, len(whole) - 4, len(whole) - 1):
        with pytest.raises(FormatError, match="gzip stream"):
            read_bytes(_write(tmp_path, whole[:length]), LIMIT)


def test_an_empty_and_a_missing_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="empty"):
        read_bytes(_write(tmp_path, b""), LIMIT)
    with pytest.raises(FormatError, match="No such file"):
        read_bytes(tmp_path / "absent", LIMIT)


def test_a_bomb_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    bomb = _write(tmp_path, gzip.compress(b"\0" * (300 << 20), compresslevel=1))
    with pytest.raises(FormatError, match="decompresses to more than"):
        read_bytes(bomb, LIMIT)


def test_a_broken_gzip_stream_is_told(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(random.Random(7).randbytes(2_000)))
    data[500] ^= 0xFF
    with pytest.raises(FormatError, match="gzip"):
        read_bytes(_write(tmp_path, bytes(data)), LIMIT)


def test_a_sparse_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = _write(tmp_path, b"{}")
    with path.open("r+b") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(FormatError, match="more than the limit"):
        read_bytes(path, LIMIT)
    with pytest.raises(FormatError, match="more than the limit") as caught:
        read_document(path, 1000, "a configuration")
    assert (caught.value.position, VARIABLE in (caught.value.hint or "")) == ("byte 1000", True)


def test_the_environment_raises_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = _write(tmp_path, gzip.compress(b"\0" * (100 << 20), compresslevel=1))
    with pytest.raises(FormatError, match="decompresses to more than"):
        read_bytes(bomb, LIMIT)
    monkeypatch.setenv(VARIABLE, str(200 << 20))
    assert len(read_bytes(bomb, LIMIT)) == 100 << 20
    assert limits().device_bytes == 200 << 20
    assert limits().input_bytes == Limits().input_bytes
    assert limits().table_bytes == Limits().table_bytes
    assert limits().packed_ratio == Limits().packed_ratio
    monkeypatch.setenv(VARIABLE, "-1")
    with pytest.raises(UsageError, match=VARIABLE):
        limits()
