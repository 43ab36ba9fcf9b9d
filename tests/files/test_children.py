from __future__ import annotations

import json

import pytest

from hespas.files.processes import decode_error, describe_end, encode_error
from hespas.graph.errors import (
    FormatError,
    HespasError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
    exit_code,
)


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (3, b"", "ends with status 3"),
        (0, b"one\n\ntwo \n", "ends with status 0: two"),
        (-11, b"", "crashes with SIGSEGV"),
        (
            -6,
            b"F0101 x.cc:7] Check failed: a == b\n    @ 0x7f\n    @ 0x8f",
            "SIGABRT: F0101 x.cc:7] Check failed: a == b",
        ),
        (-6, b"LLVM ERROR: out of luck\nAborted", "crashes with SIGABRT: LLVM ERROR: out of luck"),
        (1, b"Further on\nFeature missing", "ends with status 1: Feature missing"),
        (1, b"\xff\xfe", "ends with status 1: \ufffd\ufffd"),
        (1, b"x" * 100_000, "..."),
    ],
)
def test_how_a_process_ended(status: int, said: bytes, told: str) -> None:
    assert told in describe_end(status, said)
    assert len(describe_end(status, said)) < 1000


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no", hint="yes"),
        FormatError("broken", position="line 3"),
        UnsupportedError("not this"),
        MissingExtraError("capturing", "jax"),
    ],
)
def test_an_error_comes_through_a_pipe(error: HespasError) -> None:
    came = decode_error(json.loads(json.dumps(encode_error(error))))
    assert (came.text, came.hint, came.position) == (error.text, error.hint, error.position)
    assert exit_code(came) == exit_code(error)


def test_an_error_of_another_version_is_understood_but_unsupported() -> None:
    assert isinstance(decode_error({"kind": "NewError", "message": "?", "hint": ""}), UnsupportedError)
