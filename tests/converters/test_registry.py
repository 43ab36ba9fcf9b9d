"""Detection of formats, and formats of other packages."""

from __future__ import annotations

import gzip
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from hespas.cli.convert import app
from hespas.cli.validate import app as validate
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
from hespas.graph.errors import FormatError, InvariantError, UnsupportedError, UsageError

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


def test_every_function_that_a_format_names_is_there() -> None:
    named = [
        target
        for path in (Path(registry.__file__).parent).rglob("*.py")
        for target in re.findall(r'lazily\(\s*"([^"]+)"', path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 30
    assert all(callable(plugins.attribute_of(target)) for target in named)


@pytest.mark.parametrize(
    ("data", "is_json"),
    [
        (b'{"a": 1}', True),
        (b'\xef\xbb\xbf [ {"traceEvents" :[]}]', True),
        (b'{"\x0a\x05' + bytes(100), False),  # a frame of 123 bytes
        (b"{-# dialect_resources", False),
    ],
)
def test_documents_of_json_are_known_by_their_first_key(data: bytes, is_json: bool) -> None:
    assert Head(Path("x"), data, ()).is_json == is_json


def test_an_empty_file_and_unknown_content_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(FormatError, match="empty"):
        sniff(tmp_path / "empty")
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with pytest.raises(FormatError, match="no known format"):
        sniff(tmp_path / "picture")
    with tarfile.open(tmp_path / "ranks.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "picture", "picture")
    with pytest.raises(FormatError, match="no known format") as raised:
        sniff(tmp_path / "ranks.tar.gz")
    assert raised.value.hint == "unpack the archive, and name its folder: tar xf ranks.tar.gz"


def test_a_format_of_another_package_is_found_by_name_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return [("plugin", f"{__name__}:PLUGIN")] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    (tmp_path / "file").write_bytes(b"PLUG")
    assert find_format(tmp_path / "file", None) is PLUGIN
    assert format_names()[-1] == "plugin"


def test_a_taken_name_names_both_owners_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return [("chakra", "somebody.else:FORMAT")] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    assert format_names() == tuple(registry.BUILTIN)  # nobody listens
    with plugins.collect_plugin_errors() as told:
        assert told == {}
        assert format_names() == tuple(registry.BUILTIN)
    [sentence] = told.values()
    assert "hespas.converters.chakra:FORMAT, which is used, and by somebody.else:FORMAT" in sentence


NO_FORMAT = object()


def fails(head: object) -> int:
    raise AttributeError("no such attribute")


WITHOUT_SUFFIXES = replace(PLUGIN, name="broken", suffixes=cast("tuple[str, ...]", None))
OF_ANOTHER_NAME = replace(PLUGIN, name="chakra")
FAILING = replace(PLUGIN, name="broken", sniff=fails)


@pytest.mark.parametrize(
    ("attribute", "why"),
    [
        ("ABSENT", "AttributeError: module .* has no attribute 'ABSENT'"),
        ("NO_FORMAT", "the entry point is a object, not a Format"),
        ("WITHOUT_SUFFIXES", "TypeError: can only join an iterable"),
        ("OF_ANOTHER_NAME", "the registered format has another name, 'chakra'"),
        ("FAILING", "AttributeError: no such attribute"),
    ],
)
def test_a_broken_plug_in_is_told_once_and_fails_alone(
    attribute: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        if group != registry.ENTRY_POINT_GROUP:
            return []
        return [("broken", f"{__name__}:{attribute}"), ("plugin", f"{__name__}:PLUGIN")]

    monkeypatch.setattr(plugins, "registered", registered)
    (tmp_path / "file").write_bytes(b"PLUG")
    with plugins.collect_plugin_errors() as told:
        assert find_format(tmp_path / "file", None) is PLUGIN
    [sentence] = told.values()
    assert re.search(f"format 'broken' of another package .* does not work: {why}", sentence)
    source = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
    done = CliRunner().invoke(app, [str(source), str(tmp_path / "out.et"), "--ranks", "0"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, [str(tmp_path / "file"), str(tmp_path / "x.unheard"), "--to", "dot"])
    assert done.stderr.count("format 'broken'") == 1
    done = CliRunner().invoke(app, ["--list-formats"])
    assert done.exit_code == 0, done.output
    assert "plugin" in done.stdout
    assert ("format 'broken'" in done.stderr) == (attribute != "FAILING")  # that fails at files only
    done = CliRunner().invoke(validate, ["roundtrip", str(source), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    if attribute != "FAILING":
        with pytest.raises(UnsupportedError, match="update that package"):
            load_format("broken")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("hespas.converters.gone:FORMAT", "ModuleNotFoundError: No module named 'hespas.converters.gone'"),
        ("hespas.converters.drawing:GONE", "AttributeError: module .* has no attribute 'GONE'"),
        (f"{__name__}:NO_FORMAT", "the entry point is a object, not a Format"),
        (f"{__name__}:OF_ANOTHER_NAME", "the registered format has another name, 'chakra'"),
    ],
)
def test_a_broken_row_of_ours_is_our_bug(target: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "dot", target)
    with plugins.collect_plugin_errors() as told, pytest.raises(InvariantError) as caught:
        load_format("dot")
    assert re.fullmatch(rf"format 'dot' \({re.escape(target)}\) does not work: {why}", caught.value.message)
    assert caught.value.hint is None
    assert not told


@pytest.mark.parametrize(("name", "chosen"), [("out.pt.trace.json", "kineto"), ("out.nsys-rep", None)])
def test_a_format_that_is_only_read_names_those_that_are_written(name: str, chosen: str | None) -> None:
    with pytest.raises(UsageError, match="can be read, not written") as caught:
        format_for_output(Path(name), chosen)
    listed = str(caught.value.hint).rpartition(": ")[2].split(", ")
    assert listed == [each for each in format_names() if load_format(each).write]


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
