"""Attributes of multiply-accumulate units: see :mod:`hespas.converters.costs.macs`.

They stand at the operation, with or without the prefix ``hespas.``, or as texts among its
``mhlo.frontend_attributes``, which compilers keep.
"""

from __future__ import annotations

from typing import Protocol, cast

from hespas.converters.stablehlo.attributes import string_in
from hespas.converters.stablehlo.mlir import Attribute, Operation
from hespas.graph import ACCUMULATOR_BITS, MAC_NOISE_SIGMA

__all__ = ["MAC_ATTRIBUTES", "mac_attributes"]

_FRONTEND = "mhlo.frontend_attributes"
_SPELLINGS = {name: (name, f"hespas.{name}") for name in (ACCUMULATOR_BITS, MAC_NOISE_SIGMA)}

MAC_ATTRIBUTES: tuple[str, ...] = (*(each for names in _SPELLINGS.values() for each in names), _FRONTEND)
"""Attributes that may say so."""


class _Dictionary(Protocol):
    def __contains__(self, name: str, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Attribute: ...


def mac_attributes(op: Operation) -> dict[str, str]:
    """What an operation states, as texts; the operation's own attributes come first."""
    attributes = op.attributes
    frontend = attributes.get(_FRONTEND)
    entries = None if frontend is None else cast("_Dictionary", frontend)
    found: dict[str, str] = {}
    for name, spellings in _SPELLINGS.items():
        if entries is not None and name in entries:
            found[name] = _text(entries[name])
        for spelling in spellings:
            attribute = attributes.get(spelling)
            if attribute is not None:
                found[name] = _text(attribute)
    return found


def _text(attribute: Attribute) -> str:
    """A number without its type (``12``, not ``12 : i64``), or a text."""
    value = getattr(attribute, "value", None)
    return str(value) if isinstance(value, int | float) else string_in(attribute)
