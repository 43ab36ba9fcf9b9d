"""Inputs that are not regular files are rejected before opening, because pipes and devices may never end."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from hespas.converters import find_format
from hespas.files.streams import read_bytes, refuse_special_files
from hespas.graph.errors import FormatError

LIMIT = 1 << 20


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe.et"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", [None, "hlo", "chakra"])
def test_a_pipe_is_refused(pipe: Path, name: str | None) -> None:
    with pytest.raises(FormatError, match="not a regular file") as caught:
        find_format(pipe, name)
    assert "hespas-convert - " in (caught.value.hint or "")
    with pytest.raises(FormatError, match="not a regular file"):
        read_bytes(pipe, LIMIT)


def test_files_folders_links_and_nothing_are_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nowhere")
    for name in ("file", "link", "broken", "", "missing", "x" * 300):
        refuse_special_files(tmp_path / name)


def test_a_name_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="too long"):
        find_format(tmp_path / ("x" * 300), None)


def test_where_a_gzip_stream_breaks_is_told(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(bytes(range(256)) * 8, mtime=0))
    packed[10] |= 0x06  # the first block is of the kind that does not exist
    path = tmp_path / "broken.gz"
    path.write_bytes(packed)
    with pytest.raises(FormatError, match="broken gzip stream") as caught:
        find_format(path, None)
    assert caught.value.position == "byte 10"
    assert caught.value.hint
    with pytest.raises(FormatError, match="broken gzip stream") as caught:
        read_bytes(path, LIMIT)
    assert caught.value.hint
