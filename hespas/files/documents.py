"""JSON documents that scripts rely on: one encoder, and the types of their figures.

A document is a ``msgspec.Struct``; its schema in ``hespas/schemas`` is generated from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import msgspec
from msgspec import Meta

__all__ = ["Count", "Figure", "document_bytes", "encoded"]

Figure = Annotated[float, Meta(extra_json_schema={"type": ["number", "null"]})]
"""A number; NaN and the infinities, which JSON cannot spell, are null."""

Count = Annotated[int, Meta(ge=0)]
"""How many of something there are."""


def document_bytes(document: object) -> bytes:
    """A document as indented UTF-8 JSON that ends in a newline."""
    return msgspec.json.format(encoded(document), indent=2) + b"\n"


def encoded(document: object) -> bytes:
    """A document as compact JSON; texts that UTF-8 cannot hold are escaped."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_writable(msgspec.to_builtins(document)))


def _writable(value: object) -> object:
    """The same with unpaired surrogates, which no UTF-8 holds, written as text: ``\\ud800``."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case list() | tuple():
            return [_writable(each) for each in cast("Sequence[object]", value)]
        case dict():
            return {_writable(key): _writable(each) for key, each in cast("dict[str, object]", value).items()}
        case _:
            return value
