"""Source operations of HLO instructions: the operations of the framework's program that each instruction
implements.
"""

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
"""Instructions whose computations run under their own names; a profile has events of the inner instructions.
"""

_PRODUCTS = frozenset({"dot", "ragged-dot", "scaled-dot", "convolution"})
_LIBRARY_PRODUCT = re.compile(r"gemm|conv|matmul|cublas|dot", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Origin:
    """Operation of the source program: the framework's name of it and its position ``file:line``, each ``""``
    if unknown.

    ``multiplies`` is True for a matmul or convolution. Its name may be the name of a transpose that XLA
    merged into it.
    """

    name: str
    source: str
    multiplies: bool = False


@dataclass(frozen=True, slots=True)
class Provenance:
    """Source operations of one instruction. They are stated in the metadata of the instruction, and of all
    instructions that it fuses or calls.

    ``inferred`` is True if the compiler inserted the instruction (a copy, a bitcast). ``origins`` are then
    taken from the instructions that use its result or, if these have none, from its operands.
    """

    origins: tuple[Origin, ...]
    inferred: bool


class _CalledOrigin(NamedTuple):
    """Source operations of the instructions of a computation. ``callees`` are the names of the computations
    that it calls.
    """

    origins: dict[Origin, None]
    callees: tuple[str, ...]


def read_provenance(path: Path, max_bytes: int) -> Mapping[str, Provenance]:
    """Return the source operations by instruction name, for an HLO file in any form. Raises the reader's
    errors.
    """
    return module_provenance(read_bytes(path, max_bytes), str(path))


def module_provenance(data: bytes, name: str) -> Mapping[str, Provenance]:
    """Return the source operations by instruction name, for a module in memory. ``name`` is used in
    messages.
    """
    module = parse_module(source_of(data, name))
    try:
        return provenance_of(module)
    except ValueError as error:
        raise FormatError(
            f"an attribute is malformed: {error}", path=name, hint="dump the module again"
        ) from error


def provenance_of(module: HloModule) -> Mapping[str, Provenance]:
    """Return the source operations by instruction name, for all computations that run as parts of the
    program.

    Raises ``FormatError`` if a called computation is missing or calls itself, ``ValueError`` for a malformed
    attribute. O(instructions) plus shared computations.
    """
    callees_first(module)
    provenances: dict[str, Provenance] = {}
    entry = module.entry
    argument_names = (  # copies of the arguments have these names too
        fields(attributes["metadata"]).get("op_name", "")
        for opcode, attributes in zip(entry.opcodes, entry.attributes, strict=True)
        if opcode == "parameter" and "metadata" in attributes
    )
    arguments = frozenset(argument_names) - {""}
    cache: dict[str, _CalledOrigin] = {}
    seen = {module.entry.name}
    pending = [module.entry]
    while pending:
        computation = pending.pop()
        own = [
            _own_and_called(module, computation, index, arguments, cache) for index in range(len(computation))
        ]
        for name, origins, is_own in zip(computation.names, _spread(computation, own), own, strict=True):
            provenances[name] = Provenance(origins, inferred=not is_own)
        for callee in _entered(module, computation):
            if callee.name not in seen:
                seen.add(callee.name)
                pending.append(callee)
    return provenances


def _entered(module: HloModule, computation: Computation) -> Iterator[Computation]:
    """Yield the computations called by ``computation`` whose instructions run under their own names."""
    for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True):
        if opcode in _RUNS_ITSELF or opcode in {"call", "async-start"}:
            yield from (module.computations[name] for name in callee_names(attributes))


def _own_and_called(
    module: HloModule,
    computation: Computation,
    index: int,
    arguments: frozenset[str],
    cache: dict[str, _CalledOrigin],
) -> tuple[Origin, ...]:
    """Return the source operations of an instruction and of the computations that it calls, in text order.
    ``arguments`` are names of program arguments; source operations with such a name are left out. ``cache``
    has the source operations of called computations. No recursion.
    """
    collected = dict.fromkeys(_metadata(module, computation, index))
    runs_itself = computation.opcodes[index] in _RUNS_ITSELF
    seen: set[str] = set()
    pending = [] if runs_itself else list(callee_names(computation.attributes[index]))
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in cache:
            callee = module.computations[name]
            inner = (name for attributes in callee.attributes for name in callee_names(attributes))
            origins = (origin for at in range(len(callee)) for origin in _metadata(module, callee, at))
            cache[name] = _CalledOrigin(dict.fromkeys(origins), tuple(dict.fromkeys(inner)))
        collected.update(cache[name].origins)
        pending.extend(cache[name].callees)
    return tuple(origin for origin in collected if origin.name not in arguments)


def _metadata(module: HloModule, computation: Computation, index: int) -> Iterator[Origin]:
    text = computation.attributes[index].get("metadata")
    texts = fields(text) if text else {}
    name, source = texts.get("op_name", ""), module.frames.stated(texts)
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
    """Split the name of several operations that XLA combined: ``jit(f)/(a/add:b/mul)`` or ``a;b``."""
    if ";" in name:
        return [part for part in name.split(";") if part]
    start_of_list = name.find("/(") + 1
    if not start_of_list or not name.endswith(")"):
        return [name]
    parts, depth, start = list[str](), 0, start_of_list + 1
    for at in range(start_of_list, len(name)):
        depth += (name[at] == "(") - (name[at] == ")")
        is_end = depth == 0 and at == len(name) - 1
        if depth < 1 and not is_end:
            return [name]  # the last parenthesis closes another one
        if is_end or (depth == 1 and name[at] == ":"):
            parts.append(name[:start_of_list] + name[start:at])
            start = at + 1
    return parts


def _spread(computation: Computation, own: list[tuple[Origin, ...]]) -> list[tuple[Origin, ...]]:
    """Return the source operations of each instruction. An instruction without source operations gets the
    source operations of its users or, if these have none, of its operands. O(edges).
    """
    origins = list(own)
    users: list[list[int]] = [[] for _ in origins]
    for index, operands in enumerate(computation.operands):
        for operand in operands:
            users[operand].append(index)
    order = range(len(origins))  # operands come before their users
    for index in reversed(order):
        if not origins[index]:
            origins[index] = _merged(origins, users[index])
    for index in order:
        if not origins[index]:
            origins[index] = _merged(origins, computation.operands[index])
    return origins


def _merged(origins: list[tuple[Origin, ...]], among: tuple[int, ...] | list[int]) -> tuple[Origin, ...]:
    """Return the source operations of the first instruction in ``among`` that has some."""
    return next((origins[index] for index in among if origins[index]), ())
