"""The form a program is written in, told by the name of the file, and how a parsed program gets it."""

from __future__ import annotations

import re
from pathlib import PurePath

from hespas.converters.stablehlo.bindings import Bindings, ParseFailure
from hespas.converters.stablehlo.forms import Form, parse_program
from hespas.converters.stablehlo.mlir import Module
from hespas.graph.errors import UnsupportedError, UsageError

__all__ = ["form_of_name", "in_form"]

_BINARY = {".mlirbc", ".bc"}
_EXPORT = {".jaxexport", ".jax_export"}
_KNOWN_PLACE = re.compile(r'loc\((?!unknown\)|#loc|"-":\d)')
"""A location other than those of a text that nobody has."""


def form_of_name(name: str, version: str) -> Form:
    """The form that a file name asks for; a name that says nothing asks for text.

    Bytecode has no version: with one, a portable artifact is written. Raises ``UsageError`` for text of a
    version.
    """
    suffixes = [suffix for suffix in PurePath(name).suffixes if suffix != ".gz"]
    last = suffixes[-1] if suffixes else ""
    if last in _EXPORT:
        return Form.EXPORT
    if last == ".vhlo" or (last in _BINARY and (version or ".vhlo" in suffixes)):
        return Form.ARTIFACT
    if last in _BINARY:
        return Form.BYTECODE
    if version:
        raise UsageError(
            f"--to-version {version}: text has no version",
            path=name,
            hint="name a portable artifact, FILE.vhlo, or leave the version out",
        )
    return Form.TEXT


def in_form(data: bytes, own: Form, form: Form, version: str, bindings: Bindings) -> bytes:
    """A program that is known to parse, in a form: as it is where ``own`` is that form already.

    Raises ``UnsupportedError`` where it has no such form.
    """
    if form is own and not version:
        return data
    module = parse_program(data, "the program", bindings).module
    match form:
        case Form.TEXT:
            return _text(module, bindings).encode()
        case Form.BYTECODE:
            return bindings.bytecode(module)
        case Form.ARTIFACT:
            return _artifact(module, version, bindings)
        case Form.EXPORT:
            raise UnsupportedError(
                "a jax.export file also holds calling conventions, which no other form of a program has",
                hint="name a portable artifact, FILE.vhlo",
            )


def _artifact(module: Module, version: str, bindings: Bindings) -> bytes:
    try:
        return bindings.artifact(module, version)
    except ValueError as error:
        raise UnsupportedError(
            f"no portable artifact of StableHLO {version or 'as this jaxlib knows it'} can hold the program "
            f"({error})",
            hint="name a newer --to-version, or write bytecode: FILE.mlirbc",
        ) from None


def _text(module: Module, bindings: Bindings) -> str:
    """The program as text that parses to the same program: pretty where that is so, else generic."""
    located = bindings.text(module, locations=True)
    has_places = _KNOWN_PLACE.search(located) is not None
    text = located if has_places else bindings.text(module, locations=False)
    return (
        text
        if _is_same(text, module, bindings)
        else bindings.text(module, locations=has_places, generic=True)
    )


def _is_same(text: str, module: Module, bindings: Bindings) -> bool:
    try:
        again = bindings.parse(text, quantised="!quant." in text)
    except ParseFailure:
        return False
    one, two = (bindings.text(each, locations=False, generic=True) for each in (module, again))
    return one == two
