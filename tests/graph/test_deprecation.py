"""Aliases of deprecated names: they warn once per use and return the value of the new name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hespas.graph.deprecation import RenamedAttribute, renamed_arguments


@dataclass(frozen=True, slots=True)
class Result:
    """Dataclass with one field that had another name."""

    critical_path: int
    path = RenamedAttribute("critical_path")


@renamed_arguments(measured="profiles")
def count(profiles: int = 0) -> int:
    """Return its argument."""
    return profiles


def test_a_renamed_attribute_warns_and_returns_the_value_of_its_new_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"Result\.path is deprecated.*use Result\.critical_path"):
        assert getattr(Result(3), "path") == 3  # noqa: B009 - its type is object
    assert Result(3) == Result(critical_path=3)


def test_a_renamed_argument_warns_and_is_passed_under_its_new_name() -> None:
    assert count(profiles=2) == 2
    untyped: Callable[..., int] = count
    with pytest.warns(DeprecationWarning, match=r"count\(measured=\) is deprecated") as warned:
        assert untyped(measured=2) == 2
    assert warned[0].filename == __file__
    with pytest.raises(TypeError, match="both 'profiles' and its deprecated name 'measured'"):
        untyped(measured=2, profiles=2)
