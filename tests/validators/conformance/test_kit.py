"""The kit: 200 cases that cover every rule of traces, equal bytes for equal seeds, and a checked manifest."""

from __future__ import annotations

import json
import zipfile
from functools import cache
from pathlib import Path

import jsonschema
import msgspec
import pytest

from hespas.graph.errors import FormatError, UsageError
from hespas.schemas.chakra import READ_VERSIONS
from hespas.validators.checker import RULES
from hespas.validators.conformance import Kit, kit_bytes, make_kit, read_kit

SCHEMAS = Path(__file__).parents[3] / "hespas" / "schemas"
NOT_IN_TRACES = {"GR004", "GR005", "GR006", "GR007", "GR008", "GR009"}
"""Rules of tables, loops and tensor types, which a trace cannot break, one that no profile checks, and one
about attributes of Hespas alone.
"""


@cache
def kit() -> Kit:
    return make_kit()


def test_there_are_200_cases_with_names_of_their_own() -> None:
    names = [entry.case.name for entry in kit().cases]
    assert len(set(names)) == len(names) == 200
    assert all(entry.case.about.endswith(".") for entry in kit().cases)


def test_every_rule_of_traces_is_broken() -> None:
    broken = {rule for entry in kit().cases for rule in entry.case.rules}
    codes = {rule.code for rule in RULES if not rule.code.startswith("PR")}
    assert codes - broken == NOT_IN_TRACES


def test_every_schema_version_and_backend_occurs() -> None:
    assert {entry.case.schema for entry in kit().cases} == {*READ_VERSIONS} - {"0.0.3"}
    assert {entry.case.backend for entry in kit().cases} == {"aware", "unaware"}


def test_every_case_that_finishes_has_the_times_of_astra_sim() -> None:
    for entry in kit().cases:
        times = entry.case.finish_ns
        assert (times is not None) == (entry.case.run == "finish"), entry.case.name
        assert times is None or len(times) == entry.case.ranks


def test_counts_belong_to_files() -> None:
    for entry in kit().cases:
        assert len(entry.case.counts) == len(entry.case.files)
        assert set(entry.case.files) < set(entry.files)
        unread = [counts is None for counts in entry.case.counts]
        assert any(unread) <= (entry.case.read != "accept"), entry.case.name


def test_equal_seeds_make_equal_archives_of_at_most_2_mb() -> None:
    content = kit_bytes(kit())
    assert content == kit_bytes(make_kit())
    assert len(content) < 2_000_000
    other = make_kit(1)
    assert kit_bytes(other) != content
    assert [entry.case.name for entry in other.cases] == [entry.case.name for entry in kit().cases]


def test_an_archive_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "kit.zip"
    path.write_bytes(kit_bytes(kit()))
    again = read_kit(path)
    assert again.manifest == kit().manifest
    assert {entry.case.name: dict(entry.files) for entry in again.cases} == {
        entry.case.name: dict(entry.files) for entry in kit().cases
    }


def test_the_manifest_follows_its_schema() -> None:
    schema = json.loads((SCHEMAS / "conformance.schema.json").read_text())
    document = json.loads(msgspec.json.encode(kit().manifest))
    jsonschema.validate(document, schema)
    assert document["schema"] == "hespas.conformance/1"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "not a conformance kit"),
        ({"manifest.json": b"{}"}, "not a conformance kit"),
        ({"manifest.json": b'{"kit": 1, "seed": 0, "cases": []}', "../a": b""}, "no case for the file"),
    ],
)
def test_another_archive_is_refused(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "kit.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(FormatError, match=message):
        read_kit(path)
    path.write_bytes(b"text")
    with pytest.raises(FormatError, match="not a conformance kit"):
        read_kit(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_kit(tmp_path / "missing.zip")
