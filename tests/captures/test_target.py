"""Functions by name: their file, independent of previously loaded modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hespas.captures.target import load_function
from hespas.graph.errors import UsageError

STEP = "import {helper}\n\ndef step():\n    return {helper}.SIZE\n"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two folders with a program and its helper each, of the same names."""
    folders = tmp_path / "first", tmp_path / "second"
    for size, folder in enumerate(folders):
        folder.mkdir()
        (folder / "of_target.py").write_text(STEP.format(helper="helper_of_target"))
        (folder / "helper_of_target.py").write_text(f"SIZE = {size}\n")
    path, modules = list(sys.path), set(sys.modules)
    yield folders
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_two_files_of_one_name_have_their_own_neighbours(two: tuple[Path, Path]) -> None:
    for size in (0, 1, 0):
        assert load_function(f"{two[size] / 'of_target.py'}:step")() == size


def test_a_module_is_that_of_the_current_folder(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (0, 1):
        monkeypatch.chdir(two[size])
        assert load_function("of_target:step")() == size


def test_a_file_takes_no_name_of_the_standard_library(two: tuple[Path, Path]) -> None:
    (two[0] / "json.py").write_text("def step():\n    return 7\n")
    place = f"{two[0] / 'json.py'}:step"
    assert load_function(place)() == 7
    assert load_function(place) is load_function(place)
    assert sys.modules["json"] is json


def test_a_module_is_loaded_once(two: tuple[Path, Path]) -> None:
    place = f"{two[0] / 'of_target.py'}:step"
    assert load_function(place) is load_function(place)


def test_packages_installed_below_the_folder_stay(two: tuple[Path, Path]) -> None:
    installed = two[0] / "venv" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "installed_of_target.py").write_text("SIZE = 5\n")
    (two[0] / "uses.py").write_text(STEP.format(helper="installed_of_target"))
    sys.path.insert(0, str(installed))
    assert load_function(f"{two[0] / 'uses.py'}:step")() == 5
    before = sys.modules["installed_of_target"]
    load_function(f"{two[1] / 'of_target.py'}:step")
    assert sys.modules["installed_of_target"] is before
    assert "uses" not in sys.modules


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nothing_there:step", "module 'nothing_there' does not exist"),
        ("absent.py:f", "file does not exist"),
        ("step", "does not name"),
    ],
)
def test_what_names_no_function_says_so(target: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_function(target)
