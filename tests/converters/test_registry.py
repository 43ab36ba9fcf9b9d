"""Telling formats apart, and formats of other packages."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hespas.converters import (
    Format,
    Head,
    ReadOptions,
    Value,
    find_format,
    format_for_output,
    format_names,
    load_format,
    registry,
    sniff,
)
from hespas.graph import Diagnostics, plugins
from hespas.graph.errors import FormatError, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    raise UsageError("this plug-in only serves to be found")


def _sniff(head: Head) -> int:
    return 95 if head.data == b"PLUG" else 0


PLUGIN = Format(
    name="plugin", title="a test", suffixes=(".plug",), specification="none", sniff=_sniff, read=_read
)

_SUFFIX_FORMATS = {"stablehlo": "stablehlo", "hlo": "hlo"}


@pytest.mark.parametrize("folder", sorted(_SUFFIX_FORMATS))
def test_every_fixture_is_told_by_content_alone(folder: str, tmp_path: Path) -> None:
    for fixture in sorted((FIXTURES / folder).iterdir()):
        nameless = tmp_path / "nameless"
        nameless.write_bytes(fixture.read_bytes())
        assert sniff(nameless).name == _SUFFIX_FORMATS[folder], fixture.name


@pytest.mark.parametrize("name", ["out.json", "out.json.gz", "out.opgraph", "out.et", "out.et.gz", "traces"])
def test_the_output_format_follows_the_suffix(name: str) -> None:
    expected = {"json": "op-graph", "opgraph": "op-graph-arrow", "et": "chakra", "": "chakra"}
    suffix = name.removesuffix(".gz").partition(".")[2]
    assert format_for_output(Path(name), None).name == expected[suffix]


def test_every_listed_format_loads_and_has_its_own_name() -> None:
    assert [load_format(name).name for name in format_names()] == list(format_names())


def test_an_empty_file_and_unknown_content_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(FormatError, match="empty"):
        sniff(tmp_path / "empty")
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with pytest.raises(FormatError, match="no known format"):
        sniff(tmp_path / "picture")


def test_a_format_of_another_package_is_found_by_name_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return [("plugin", f"{__name__}:PLUGIN")] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    (tmp_path / "file").write_bytes(b"PLUG")
    assert find_format(tmp_path / "file", None) is PLUGIN
    assert format_names()[-1] == "plugin"


def test_a_taken_name_names_both_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return [("chakra", "somebody.else:FORMAT")] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    with pytest.raises(UsageError, match=r"hespas\.converters\.chakra:FORMAT.*somebody\.else:FORMAT"):
        format_names()


def test_a_packed_file_that_yields_nothing_ends_early_and_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "cut.mlir.gz").write_bytes(gzip.compress(b"module {}", mtime=0)[:11])
    with pytest.raises(FormatError, match="ends early") as caught:
        sniff(tmp_path / "cut.mlir.gz")
    assert caught.value.position == "byte 11"
    (tmp_path / "empty.mlir.gz").write_bytes(gzip.compress(b"", mtime=0))
    with pytest.raises(FormatError, match="is empty"):
        sniff(tmp_path / "empty.mlir.gz")


def test_content_like_none_of_the_formats_of_a_suffix_names_them_all(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_text("DATTA\n1\nx -1 5 NONE 0 5 NONE 0 5 ALLREDUCE 1048576 5\n")
    with pytest.raises(FormatError, match="may be hlo, astra-text"):
        sniff(path)


@pytest.mark.parametrize(
    ("name", "profile", "expected"),
    [
        ("a.json", False, "op-graph"),
        ("a.json", True, "chrome-trace"),
        ("a.json", None, "op-graph"),
        ("a.trace.json.gz", True, "chrome-trace"),
        ("a.trace.json", False, "chrome-trace"),
        ("a.b.json", False, "op-graph"),
        ("traces", True, "chakra"),
    ],
)
def test_the_longest_suffix_and_then_what_is_written_choose(
    name: str, profile: bool | None, expected: str
) -> None:
    assert format_for_output(Path(name), None, profile=profile).name == expected
