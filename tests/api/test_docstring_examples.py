"""Examples in the docstrings of public functions: each function has one, and its output is exact."""

from __future__ import annotations

import doctest
import inspect
import sys
from pathlib import Path

import pytest

import hespas

FUNCTIONS = [name for name in hespas.__all__ if not name.startswith("_")]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "samples"
    hespas.sample(["all"], folder=folder)
    return folder


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_prints_what_it_shows(
    name: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "samples").symlink_to(samples, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    documented = inspect.getdoc(getattr(hespas, name)) or ""
    test = doctest.DocTestParser().get_doctest(documented, {"hespas": hespas}, name, None, None)
    assert test.examples, f"hespas.{name} has no example"
    printed: list[str] = []
    doctest.DocTestRunner().run(test, out=printed.append)
    assert printed == []
