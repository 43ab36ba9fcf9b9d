"""Messages of checks of broken traces describe the fault."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import pytest

from hespas.converters import sniff
from hespas.graph.errors import FormatError
from hespas.validators.checker import CheckOptions, check
from tests.chakra_messages import reference_messages


def _told(path: Path) -> list[tuple[str, str]]:
    return [(entry.code, entry.message) for entry in check([path]).violations]


def test_bytes_that_are_no_trace_are_no_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "random.et"
    path.write_bytes(b"\x80\x80" + Random(7).randbytes(4000))
    assert "empty" not in str(_told(path))
    path.write_bytes(b"\x04\xff\xff\xff\xff" * 9)
    assert _told(path) == [("ET003", "byte 0: the first frame is not a Chakra message")]


@pytest.mark.parametrize("name", ["empty.et", "empty.0.et", "empty.et.gz"])
def test_an_empty_trace_is_told_by_its_rule(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    assert _told(path) == [("ET002", "the file is empty")]
    with pytest.raises(FormatError, match="ET002: the file is empty"):
        sniff(path)
    named = check([path], options=CheckOptions(format="chakra")).violations
    assert [(entry.code, entry.message) for entry in named] == [("ET002", "byte 0: the file is empty")]


def test_an_empty_file_of_no_known_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").write_bytes(b"")
    with pytest.raises(FormatError, match="nothing: the file is empty"):
        sniff(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            [{"name": "comm_type", "int64_val": 77}],
            "a collective states an unknown kind: comm_type 77",
        ),
        (
            [{"name": "comm_type", "int64_val": -2}],
            "a collective states an unknown kind: comm_type -2",
        ),
        ([], "a collective does not state its kind"),
    ],
)
def test_a_kind_that_there_is_not_is_a_stated_one(
    tmp_path: Path, attributes: list[dict[str, object]], message: str
) -> None:
    messages = reference_messages()
    size = {"name": "comm_size", "int64_val": 8}
    node = messages.node(id=1, name="sum", type=7, attr=[size, *attributes]).SerializeToString()
    head = messages.metadata(version="0.0.4").SerializeToString()
    path = tmp_path / "w.0.et"
    path.write_bytes(bytes([len(head)]) + head + bytes([len(node)]) + node)
    assert [entry for entry in _told(path) if entry[0] == "ET011"] == [("ET011", f"sum: {message}")]
