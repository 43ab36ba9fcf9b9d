"""Diagnostics: exact counts, limited samples, and errors with data and exit code."""

from __future__ import annotations

import pytest

from hespas.graph import Diagnostics, Renamed, Severity
from hespas.graph.errors import (
    EXIT_CODES,
    CheckFailedError,
    FormatError,
    HespasError,
    InvariantError,
    MissingExtraError,
    OutputError,
    UnsupportedError,
    UsageError,
    exit_code,
)


def test_counts_are_exact_and_memory_is_bounded() -> None:
    diagnostics = Diagnostics(keep=5)
    for number in range(10_000):
        diagnostics.warning("x.unknown-op", f"line {number}", "unknown op")
    diagnostics.error("x.other", "line 1", "other", count=3)
    assert diagnostics.counts() == {"x.unknown-op": 10_000, "x.other": 3}
    assert diagnostics.count(Severity.WARNING) == 10_000
    assert diagnostics.count(Severity.ERROR) == 3
    assert len(diagnostics) == 10_003
    assert [finding.location for finding in diagnostics][:5] == [f"line {number}" for number in range(5)]
    assert len(list(diagnostics)) == 6


def test_nothing_found_is_nothing_recorded() -> None:
    diagnostics = Diagnostics()
    diagnostics.info("x.none", "", "", count=0)
    assert diagnostics.counts() == {}
    assert list(diagnostics) == []


def test_same_code_with_two_severities_is_counted_apart() -> None:
    diagnostics = Diagnostics()
    diagnostics.info("x", "a", "m")
    diagnostics.error("x", "b", "m", count=2)
    assert diagnostics.counts() == {"x": 3}
    assert diagnostics.count(Severity.INFO) == 1
    assert diagnostics.count(Severity.ERROR) == 2


def test_extend_keeps_counts_and_bound() -> None:
    one, two = Diagnostics(keep=3), Diagnostics(keep=3)
    for number in range(2):
        one.warning("x", f"one {number}", "m")
    for number in range(5):
        two.warning("x", f"two {number}", "m")
    one.extend(two)
    assert one.counts() == {"x": 7}
    assert [finding.location for finding in one] == ["one 0", "one 1", "two 0"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckFailedError("x"), 1),
        (UsageError("x"), 2),
        (OutputError("x"), 2),
        (FormatError("x"), 3),
        (UnsupportedError("x"), 4),
        (MissingExtraError("x", "jax"), 4),
        (InvariantError("x"), 70),
        (HespasError("x"), 70),
        (ValueError("x"), 70),
        (KeyboardInterrupt(), 70),
    ],
)
def test_exit_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_every_error_class_has_an_exit_code() -> None:
    for kind in HespasError.__subclasses__():
        assert kind in EXIT_CODES


def test_message_names_file_position_and_remedy() -> None:
    error = FormatError("unexpected token", path="a.mlir", position="line 3", hint="check the version")
    assert str(error) == "a.mlir: line 3: unexpected token\n  try: check the version"
    assert str(FormatError("bare")) == "bare"
    assert "hespas[jax]" in str(MissingExtraError("capture", "jax", detail="no jaxlib"))


def test_findings_of_one_place_share_prefix_and_location() -> None:
    diagnostics = Diagnostics()
    findings = diagnostics.about("a.json", "kineto")
    findings.info("other-events", "left out", 3)
    findings.warning("unlinked", "no operation", 0)
    findings.error("broken", "no time")
    assert diagnostics.counts() == {"kineto.other-events": 3, "kineto.broken": 1}
    assert [(each.severity, each.location, each.message) for each in diagnostics] == [
        (Severity.INFO, "a.json", "left out"),
        (Severity.ERROR, "a.json", "no time"),
    ]


def test_findings_are_handed_on_under_another_name() -> None:
    into = Diagnostics()
    renamed = Renamed(into, "folder/copy", "trace.json", without=("no.news",))
    renamed.warning("some.code", "folder/copy:3", "odd", path="folder/copy", count=4)
    renamed.warning("no.news", "folder/copy", "known")
    assert into.counts() == renamed.counts() == {"some.code": 4}
    (found,) = into
    assert (found.location, found.path) == ("trace.json:3", "trace.json")
