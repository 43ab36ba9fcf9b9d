"""Limits of tests are independent of other load on the machine."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.limits import cpu_limited

TESTS = Path(__file__).parent


@cache
def _bounds() -> tuple[tuple[str, str, str, bool], ...]:
    """Return place, function, keyword and whether it is a number, of all calls that bound a time."""
    words = ("timeout=", "deadline=", "suppress_health_check=")
    found: list[tuple[str, str, str, bool]] = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in words):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                place, name = f"{path.relative_to(TESTS)}:{node.lineno}", ast.unparse(node.func)
                found += [
                    (place, name, keyword.arg, isinstance(keyword.value, ast.Constant))
                    for keyword in node.keywords
                    if keyword.arg and f"{keyword.arg}=" in words
                ]
    return tuple(found)


def test_waits_are_bounded_by_the_safety_limit_alone() -> None:
    """A number of seconds for a process to end is too short on a machine that is busy enough."""
    assert [found for found in _bounds() if found[2] == "timeout" and found[3]] == []


def test_one_profile_of_hypothesis_holds_for_all_tests() -> None:
    wrong = [found for found in _bounds() if found[1] == "settings" and found[2] != "timeout"]
    assert wrong == []
    profile = settings()
    assert profile.deadline is None
    assert HealthCheck.too_slow in profile.suppress_health_check


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end a process in other ways")
def test_processor_time_ends_a_process() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    done = subprocess.run(command, check=False, preexec_fn=cpu_limited(1))
    assert done.returncode == -signal.SIGXCPU
