"""Counts of unclear texts and names, which must not rise.

``python -m tools.texture --list 20`` prints the places.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tools.texture import Texture, count_texture, documents_of

ROOT = Path(__file__).parents[1]

LIMITS = {
    "relative docstring": 5,
    "idiom": 80,
    "idiom in a document": 20,
    "banner": 0,
    "class name": 0,
}


@cache
def texture() -> Texture:
    return count_texture(ROOT / "hespas", documents_of(ROOT), ROOT)


@pytest.mark.parametrize("kind", LIMITS)
def test_the_count_stays_within_its_limit(kind: str) -> None:
    places = texture().places[kind]
    assert len(places) <= LIMITS[kind], places[:20]


def test_private_functions_are_called_from_more_than_one_place() -> None:
    assert texture().count("one caller") <= 0.449 * texture().private_functions


def test_names_say_what_they_hold() -> None:
    assert texture().count("vague name") <= 0.002 * texture().assigned_names


def test_modules_are_neither_split_nor_pasted() -> None:
    assert texture().files <= 3.55 * texture().lines / 1000


def test_the_counts_see_their_places(tmp_path: Path) -> None:
    lines = [
        '"""Whether it works."""',
        *[""] * 20,
        "# Part two.",
        "",
        "def _once():",
        '    """What is done."""',
        '    told = "nobody knows what this is"',
        "    return told",
        "",
        "print(_once())",
        *(f"class Asked{number}: ..." for number in range(2)),
    ]
    package = tmp_path / "package"
    package.mkdir()
    for name in "abcd":
        (package / f"{name}.py").write_text("\n".join([*lines, "class _Source: ..."]), encoding="utf-8")
    document = tmp_path / "page.md"
    document.write_text("This is told.\n```\nis told\n```\n", encoding="utf-8")
    counted = count_texture(package, [document], tmp_path)
    assert {kind: len(places) for kind, places in counted.places.items()} == {
        "relative docstring": 8,
        "idiom": 4,
        "vague name": 4,
        "one caller": 4,
        "banner": 4,
        "class name": 3,
        "idiom in a document": 1,
    }
    assert counted.files == counted.private_functions == 4
