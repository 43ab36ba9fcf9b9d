"""Brackets outside strings, found for blocks of a text at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hespas.files.documents import Brackets, BracketScan, array_cut

_TEXTS = st.lists(st.sampled_from([b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"a"]), max_size=60).map(
    b"".join
)


def one_by_one(text: bytes) -> list[tuple[bool, int, int]]:
    """The same, a character at a time."""
    inside = escaped = False
    depth = 0
    found: list[tuple[bool, int, int]] = []
    for byte in text:
        if escaped:
            escaped = False
        elif byte == ord("\\"):
            escaped = True
        elif byte == ord('"'):
            inside = not inside
        step = 0 if inside else (byte in b"{[") - (byte in b"}]")
        depth += step
        found.append((inside, step, depth))
    return found


def rows(found: Brackets) -> list[tuple[bool, int, int]]:
    return list(zip(found.inside.tolist(), found.step.tolist(), found.depth.tolist(), strict=True))


@given(_TEXTS, st.integers(1, 8))
def test_blocks_say_what_the_whole_text_says(text: bytes, size: int) -> None:
    assert rows(BracketScan().scan(text)) == one_by_one(text)
    scan = BracketScan()
    pieces = [rows(scan.scan(text[at : at + size])) for at in range(0, len(text), size)]
    assert [row for piece in pieces for row in piece] == one_by_one(text)


def test_an_array_is_cut_behind_its_last_whole_object() -> None:
    assert array_cut(b'{"a": "}"}, {"b": [1') == (10, -1)
    assert array_cut(b'{"a": 1}]}') == (8, 8)
    assert array_cut(b'"}"') == (0, -1)
