"""Which operations of the source program each instruction of an HLO module carries out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hespas.converters.hlo.attributes import callee_names, fields
from hespas.converters.hlo.module import Computation, HloModule
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.reader import callees_first, source_of
from hespas.files.streams import read_bytes
from hespas.graph.errors import FormatError

__all__ = ["Origin", "Provenance", "module_provenance", "provenance_of", "read_provenance"]

_RUNS_ITSELF = frozenset({"while", "conditional"})
"""Instructions whose computations are no part of them: a profile has events of what is inside."""


_PRODUCTS = frozenset({"dot", "ragged-dot", "scaled-dot", "convolution"})
_LIBRARY_PRODUCT = re.compile(r"gemm|conv|matmul|cublas|dot", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation as the framework names it, and where it stands: ``file:line``, each ``""`` unknown.

    ``multiplies`` says that the instruction is a product or a convolution, which may bear the name of the
    transpose that XLA folded into it.
    """

    name: str
    source: str
    multiplies: bool = False


@dataclass(frozen=True, slots=True)
class Provenance:
    """What one instruction carries out: its own metadata and that of all it fuses or calls, each once.

    ``inferred`` says that the compiler made the instruction up (a copy, a bitcast) and that ``origins`` are
    those of the instructions that use its result, else of those that make its operands.
    """

    origins: tuple[Origin, ...]
    inferred: bool


class _CalledOrigin(NamedTuple):
    """The origins that a computation's own instructions have, and the computations they name."""

    origins: dict[Origin, None]
    callees: tuple[str, ...]


def read_provenance(path: Path, max_bytes: int) -> Mapping[str, Provenance]:
    """By instruction name, of a file of HLO in any form. Raises as the reader of ``hlo`` does."""
    return module_provenance(read_bytes(path, max_bytes), str(path))


def module_provenance(data: bytes, name: str) -> Mapping[str, Provenance]:
    """The same of a module held in memory, which messages call ``name``."""
    module = parse_module(source_of(data, name))
    try:
        return provenance_of(module)
    except ValueError as error:
        raise FormatError(
            f"an attribute is malformed: {error}", path=name, hint="dump the module again"
        ) from error


def provenance_of(module: HloModule) -> Mapping[str, Provenance]:
    """By instruction name: instructions of all computations that are reached by control flow alone.

    Raises ``FormatError`` where a computation that is called is absent or calls itself, ``ValueError`` for a
    malformed attribute. O(instructions) apart from what computations share.
    """
    callees_first(module)
    found: dict[str, Provenance] = {}
    entry = module.entry
    argument_names = (  # copies of the arguments have these names too
        fields(attributes["metadata"]).get("op_name", "")
        for opcode, attributes in zip(entry.opcodes, entry.attributes, strict=True)
        if opcode == "parameter" and "metadata" in attributes
    )
    arguments = frozenset(argument_names) - {""}
    told: dict[str, _CalledOrigin] = {}
    seen = {module.entry.name}
    pending = [module.entry]
    while pending:
        computation = pending.pop()
        own = [
            _own_and_called(module, computation, index, arguments, told) for index in range(len(computation))
        ]
        for name, origins, is_own in zip(computation.names, _spread(computation, own), own, strict=True):
            found[name] = Provenance(origins, inferred=not is_own)
        for callee in _entered(module, computation):
            if callee.name not in seen:
                seen.add(callee.name)
                pending.append(callee)
    return found


def _entered(module: HloModule, computation: Computation) -> Iterator[Computation]:
    """Computations whose instructions run under their own names."""
    for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True):
        if opcode in _RUNS_ITSELF or opcode in {"call", "async-start"}:
            yield from (module.computations[name] for name in callee_names(attributes))


def _own_and_called(
    module: HloModule,
    computation: Computation,
    index: int,
    arguments: frozenset[str],
    told: dict[str, _CalledOrigin],
) -> tuple[Origin, ...]:
    """The metadata of an instruction and of what it calls, in order of the text; not the names of arguments,
    which no operation has. ``told`` remembers computations. No recursion.
    """
    found = dict.fromkeys(_metadata(module, computation, index))
    runs_itself = computation.opcodes[index] in _RUNS_ITSELF
    seen: set[str] = set()
    pending = [] if runs_itself else list(callee_names(computation.attributes[index]))
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in told:
            told[name] = _told(module, module.computations[name])
        found.update(told[name].origins)
        pending.extend(told[name].callees)
    return tuple(origin for origin in found if origin.name not in arguments)


def _told(module: HloModule, computation: Computation) -> _CalledOrigin:
    """What the instructions of a computation say themselves."""
    rows = range(len(computation))
    callees = (name for attributes in computation.attributes for name in callee_names(attributes))
    origins = (origin for index in rows for origin in _metadata(module, computation, index))
    return _CalledOrigin(dict.fromkeys(origins), tuple(dict.fromkeys(callees)))


def _metadata(module: HloModule, computation: Computation, index: int) -> Iterator[Origin]:
    text = computation.attributes[index].get("metadata")
    told = fields(text) if text else {}
    name, source = told.get("op_name", ""), module.frames.stated(told)
    if not (name or source) or computation.opcodes[index] in {"parameter", "constant"}:
        return
    attributes = computation.attributes[index]
    multiplies = computation.opcodes[index] in _PRODUCTS or (
        computation.opcodes[index] == "custom-call"
        and _LIBRARY_PRODUCT.search(attributes.get("custom_call_target", "")) is not None
    )
    for part in _parts(name):
        yield Origin(part, source, multiplies)


def _parts(name: str) -> list[str]:
    """The names of operations that the compiler combined into one: ``jit(f)/(a/add:b/mul)``, or ``a;b``."""
    if ";" in name:
        return [part for part in name.split(";") if part]
    at = name.find("/(") + 1
    if not at or not name.endswith(")"):
        return [name]
    parts, depth, start = list[str](), 0, at + 1
    for place in range(at, len(name)):
        depth += (name[place] == "(") - (name[place] == ")")
        is_end = depth == 0 and place == len(name) - 1
        if depth < 1 and not is_end:
            return [name]  # the parenthesis at the end is another one's
        if is_end or (depth == 1 and name[place] == ":"):
            parts.append(name[:at] + name[start:place])
            start = place + 1
    return parts


def _spread(computation: Computation, own: list[tuple[Origin, ...]]) -> list[tuple[Origin, ...]]:
    """Origins for instructions without any: of their users, else of what they use. O(edges)."""
    found = list(own)
    users: list[list[int]] = [[] for _ in found]
    for index, operands in enumerate(computation.operands):
        for operand in operands:
            users[operand].append(index)
    order = range(len(found))  # operands stand before their users
    for index in reversed(order):
        if not found[index]:
            found[index] = _merged(found, users[index])
    for index in order:
        if not found[index]:
            found[index] = _merged(found, computation.operands[index])
    return found


def _merged(found: list[tuple[Origin, ...]], among: tuple[int, ...] | list[int]) -> tuple[Origin, ...]:
    """The origins of the first of some instructions that has any."""
    return next((found[index] for index in among if found[index]), ())
