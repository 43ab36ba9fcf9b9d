"""Inputs derived from valid ones, equal for equal seeds: with changed fields, or with damaged bytes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Literal

from tests.fuzzing import documents, stores
from tests.fuzzing.damage import MAX_BYTES, damaged
from tests.fuzzing.trees import Document, Group, changed

__all__ = ["CODECS", "Codec", "Input", "Kind", "codec_of", "mutated"]

Input = Mapping[str, bytes]
"""The files of an input by name."""

Kind = Literal["fields", "bytes"]
Codec = tuple[Callable[[bytes], Group], Callable[[Group], bytes]]

_TEXT: Codec = (documents.decode_text, documents.encode_text)
_JSON: Codec = (documents.decode_json, documents.encode_json)
_WIRE: Codec = (documents.decode_wire, documents.encode_wire)
_DATABASE: Codec = (stores.decode_database, stores.encode_database)

CODECS: Mapping[str, Codec] = {
    ".mlir": _TEXT,
    ".hlo": _TEXT,
    ".txt": _TEXT,
    ".toml": _TEXT,
    ".yml": _TEXT,
    ".json": _JSON,
    ".jsonl": _TEXT,
    ".pb": _WIRE,
    ".pftrace": _WIRE,
    ".et": (documents.decode_frames, documents.encode_wire),
    ".csv": (documents.decode_csv, documents.encode_csv),
    ".sqlite": _DATABASE,
    ".db": _DATABASE,
    ".arrow": (stores.decode_arrow, stores.encode_arrow),
    ".parquet": (stores.decode_parquet, stores.encode_parquet),
    ".npz": (stores.decode_arrays, stores.encode_arrays),
    ".mlirbc": (stores.decode_bytecode, stores.encode_bytecode),
}
"""How files are taken apart and put together, by the end of their names."""


def codec_of(name: str) -> Codec:
    """The codec of a file by its name."""
    return CODECS[name[name.rindex(".") :]]


@lru_cache(maxsize=256)
def _document(name: str, data: bytes) -> Document | None:
    """The fields of a file; None where it is of a form that has no codec."""
    try:
        return Document(codec_of(name)[0](data))
    except (ValueError, LookupError, sqlite3.Error):
        return None


def mutated(seeds: Sequence[Input], number: int, seed: int, kind: Kind) -> Input:
    """The ``number``-th input made from ``seeds``: one of their files is changed."""
    rng = Random(f"{seed}:{number}")
    chosen = rng.choice(seeds)
    name = rng.choice(sorted(chosen))
    others = [each[name] for each in seeds if name in each]
    document = _document(name, chosen[name]) if kind == "fields" else None
    if document is None:
        return {**chosen, name: damaged(chosen[name], others, rng)}
    with changed(document, rng) as tree:
        data = codec_of(name)[1](tree)
    return {**chosen, name: data[: max(MAX_BYTES, 3 * len(chosen[name]))]}
