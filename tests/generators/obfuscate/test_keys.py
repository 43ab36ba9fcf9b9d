"""Tokens: equal for equal texts, reversible only with the key, without the hidden words."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.generators.obfuscate import Key, load_key
from hespas.graph.errors import FormatError, UsageError

KEY, OTHER = Key(b"a key of this test"), Key(b"another key of it")


@given(text=st.text(max_size=80))
def test_tokens_come_back(text: str) -> None:
    token = KEY.token(text)
    assert KEY.token(text) == token
    assert not text or KEY.text(token) == text
    assert not text or OTHER.token(text) != token
    assert OTHER.text(token) is None


def test_the_end_of_a_text_comes_back() -> None:
    for text in ("\0", "a\0\0", "\x80", "a" * 15, "a" * 16, "\ud800"):
        assert KEY.text(KEY.token(text)) == text


def test_tokens_of_short_names_have_one_length() -> None:
    assert len({len(KEY.token(text)) for text in ("a", "layers.0", "aten::addmm")}) == 1


def test_a_changed_token_is_refused() -> None:
    token = KEY.token("layers.0.attention")
    changed = [token[:position] + ("0" if token[position] != "0" else "1") + token[position + 1 :]
               for position in range(1, len(token))]  # fmt: skip
    assert all(KEY.text(each) is None for each in changed)
    assert KEY.text(token[:-2]) is None
    assert KEY.text("mm") is None


def test_a_key_file_is_made_once_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "trace.key"
    made = load_key(path, create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(path, create=False) == made
    assert load_key(path, create=True) == made
    assert len(made.secret) == 64


def test_files_that_are_no_keys(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"secret\n")
    with pytest.raises(FormatError, match="6 bytes"):
        load_key(short, create=True)
    with pytest.raises(FormatError, match="folder"):
        load_key(tmp_path, create=True)
    with pytest.raises(UsageError, match="does not exist"):
        load_key(tmp_path / "absent", create=False)
    with pytest.raises(FormatError, match="a device or pipe is not a key"):
        load_key(Path("/dev/null"), create=True)
    with pytest.raises(FormatError, match="cannot be read"):
        load_key(Path("/proc/self/mem"), create=True)
