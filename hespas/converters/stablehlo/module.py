"""A module and its functions: entry, calls, donated arguments, meshes, number of devices; and templates.

Each function becomes a template once, when it is first called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from hespas.converters.program_bytes import program_bytes
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.converters.stablehlo.attributes import CALLEES
from hespas.converters.stablehlo.communication import Mesh, read_mesh
from hespas.converters.stablehlo.mlir import (
    Bindings,
    Block,
    Module,
    Operation,
    Type,
    int_of,
    members_of,
    place_of,
    quoted,
    text_of,
)
from hespas.converters.stablehlo.template import Template, check_size
from hespas.converters.stablehlo.types import TypeTable
from hespas.converters.stablehlo.walker import Shared, Walker
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._mlir import ir

__all__ = ["Frame", "FunctionLibrary", "call_sites", "parsed_ranks", "ranks_text", "read_frame"]

_DONATED = ("tf.aliasing_output", "jax.buffer_donor")


class Frame(NamedTuple):
    """What a module says outside its operations.

    ``num_replicas`` and ``num_partitions`` are 0 where it does not say. ``donated`` are positions of entry
    arguments whose buffers may be overwritten. ``ranks`` is the part of the job that a replay of one rank
    class stands for (see :mod:`.ranks`), empty for all.
    """

    name: str
    functions: Mapping[str, Operation]
    entry: str
    donated: frozenset[int]
    meshes: Mapping[str, Mesh]
    num_replicas: int
    num_partitions: int
    is_replay: bool
    ranks: str = ""

    def body(self, name: str) -> Block | None:
        """The entry block of a function, None where it has no body or does not exist."""
        function = self.functions.get(name)
        if function is None or not len(function.regions[0].blocks):
            return None
        return function.regions[0].blocks[0]

    def program_bytes(self, types: TypeTable) -> str:
        """Bytes of the arguments, of the results and of arguments over which results are written."""
        entry = self.functions[self.entry]
        signature = cast("ir.FunctionType", cast("ir.TypeAttr", entry.attributes["function_type"]).value)
        inputs, results = (
            [_bytes(types, each) for each in side] for side in (signature.inputs, signature.results)
        )
        return program_bytes(inputs, results, self.donated)


def _bytes(types: TypeTable, kind: Type) -> float:
    return sum(tensor.bytes for tensor in types.get(kind).tensors)


def read_frame(module: Module, bindings: Bindings, end: str) -> Frame:
    """The frame of a module that ends at position ``end``. Raises ``FormatError`` where there is nothing to
    run or no telling what.
    """
    top = module.operation
    block = module.body
    while len(block.operations) == 1 and block.operations[0].operation.name == "builtin.module":
        top = block.operations[0].operation
        block = top.regions[0].blocks[0]
    functions: dict[str, Operation] = {}
    meshes: dict[str, Mesh] = {}
    for view in block.operations:
        op = view.operation
        if op.name == "func.func":
            functions[text_of(op, "sym_name")] = op
        elif op.name == "sdy.mesh":
            attribute = op.attributes.get("mesh")
            if attribute is not None:
                meshes[text_of(op, "sym_name")] = read_mesh(attribute, bindings.sdy)
    modules = sum(view.operation.name == "builtin.module" for view in block.operations)
    if not functions and modules > 1:
        raise FormatError(
            f"the file holds {modules} modules",
            position=end,
            hint="give each a file of its own (those of MLIR's tests are divided by '// -----')",
        )
    entry = _entry(functions, end)
    return Frame(
        text_of(top, "sym_name") or entry,
        functions,
        entry,
        _donated(functions[entry]),
        meshes,
        _positive(top, "mhlo.num_replicas"),
        _positive(top, "mhlo.num_partitions"),
        "hespas.replay" in top.attributes,
        _ranks(top),
    )


def _positive(top: Operation, name: str) -> int:
    hint = "it must be at least 1"
    try:
        count = int_of(top, name, 0)
    except (AttributeError, ValueError) as error:
        raise FormatError(f"{name} is no integer", position=_header_place(top), hint=hint) from error
    if count < 0 or (name in top.attributes and count == 0):
        raise FormatError(f"{name} = {count}", position=_header_place(top), hint=hint)
    return count


def _ranks(top: Operation) -> str:
    """The ranks of a replay of one rank class, empty where it does not say. Any bytes may stand there."""
    marks = top.attributes.get("hespas.replay")
    if marks is None or not hasattr(marks, "__contains__"):
        return ""
    entries = cast("ir.DictAttr", marks)
    stated = getattr(entries["ranks"], "value_bytes", b"") if "ranks" in entries else b""
    return stated.decode("utf-8", "backslashreplace") if isinstance(stated, bytes) else ""


def _header_place(top: Operation) -> str:
    return f"module header ({place_of(str(top.location))})"


def _entry(functions: Mapping[str, Operation], end: str) -> str:
    """``main``, else the only public function with a body."""
    bodies = {name: op for name, op in functions.items() if len(op.regions[0].blocks)}
    if "main" in bodies:
        return "main"
    public = [name for name, op in bodies.items() if text_of(op, "sym_visibility") != "private"]
    if len(public) == 1:
        return public[0]
    if not bodies:
        raise FormatError(
            "the module has no function with a body",
            position=end,
            hint="expected a StableHLO module with a function @main; was the export interrupted?",
        )
    listed = ", ".join(f"@{quoted(name, 60)}" for name in (public or list(bodies))[:8])
    raise FormatError(
        f"no function @main, and {len(public)} public ones: {listed}",
        position=end,
        hint="name the step function main",
    )


def _donated(entry: Operation) -> frozenset[int]:
    rows = [cast("ir.DictAttr", row) for row in members_of(entry, "arg_attrs")]
    return frozenset(place for place, row in enumerate(rows) if any(name in row for name in _DONATED))


# --- Lists of ranks as text: ``0-3,8-14/2`` is 0, 1, 2, 3, 8, 10, 12, 14.


_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?")
_SHORTEST = 3
"""Of ranks that are written as a run with a step."""


def ranks_text(ranks: IntArray) -> str:
    """Ascending ranks as runs of equal steps. O(ranks)."""
    runs: list[str] = []
    listed: list[int] = ranks.tolist()
    place = 0
    while place < len(listed):
        end = _end_of_run(listed, place)
        first, last = listed[place], listed[end - 1]
        step = listed[place + 1] - first if end - place > 1 else 1
        if end - place < _SHORTEST and step > 1:
            end, last = place + 1, first
        runs.append(f"{first}" if last == first else f"{first}-{last}" + (f"/{step}" if step > 1 else ""))
        place = end
    return ",".join(runs)


def _end_of_run(listed: list[int], place: int) -> int:
    """One past the last rank that continues the step between the first two."""
    end = min(place + 2, len(listed))
    while end < len(listed) and listed[end] - listed[end - 1] == listed[place + 1] - listed[place]:
        end += 1
    return end


def parsed_ranks(text: str) -> IntArray:
    """The ranks of a text. Raises ``ValueError`` for one that is no such list or names more than 2**24."""
    parts: list[IntArray] = []
    left = MAX_DEVICES
    for run in text.split(","):
        found = _RUN.fullmatch(run)
        if found is None:
            raise ValueError(f"{run[:40]!r} is no run of ranks")
        first = int(found[1])
        last, step = int(found[2] or first), int(found[3] or 1)
        count = (last - first) // step + 1 if step and last >= first else 0
        if not 0 < count <= left or last >= MAX_DEVICES:
            raise ValueError(f"{run!r} is no run of ranks below {MAX_DEVICES:,}")
        left -= count
        parts.append(np.arange(first, last + 1, step, dtype=np.int64))
    return np.concatenate(parts)


# --- its functions as templates


_MAX_ACTIVE = 20
"""Functions read inside one another before the rest of a chain is read callees first, without nesting."""

_FEW_NODES = 1 << 16
"""A function of more, calls written out, has calls counted before they are written out any further."""


class FunctionLibrary:
    """Templates of one module. ``shared`` is set once the reader has built it around the library."""

    def __init__(self, frame: Frame, bindings: Bindings) -> None:
        self.shared: Shared | None = None
        self._frame = frame
        self._bindings = bindings
        self._templates: dict[str, Template] = {}
        self._active: dict[str, None] = {}
        self._is_counted = False

    def template(self, name: str) -> Template:
        """The template of a function. Raises ``FormatError`` where it has no body or calls itself,
        ``UnsupportedError`` where it has several blocks.
        """
        known = self._templates.get(name)
        if known is not None:
            return known
        if name in self._active:
            raise _cycle(list(self._active), name)
        if len(self._active) < _MAX_ACTIVE:
            return self._read(name)
        for each in self._callees_first(name):
            if each not in self._templates:
                self._read(each)
        return self._templates[name]

    def _read(self, name: str) -> Template:
        block = self._frame.body(name)
        if block is None or self.shared is None:
            raise FormatError(
                f"@{name} is called and has no body here",
                position=f"function @{name}",
                hint="export the module with all its functions",
            )
        if len(self._frame.functions[name].regions[0].blocks) > 1:
            raise UnsupportedError(
                f"@{name} jumps between blocks",
                position=f"function @{name}",
                hint="StableHLO has while, if and case; lift other control flow to them first",
            )
        self._active[name] = None
        # Nobody makes the arguments of the entry: they depend on nothing.
        is_entry = name == self._frame.entry
        template = Template(name, 0 if is_entry else len(block.arguments))
        Walker(self.shared, template).read(block, is_entry=is_entry)
        del self._active[name]
        self._templates[name] = template
        if len(template) > _FEW_NODES and not self._is_counted:
            self._is_counted = True
            self._check_inlined()
        return template

    def _check_inlined(self) -> None:
        """Refuse, before more is copied, what calls would make too large: functions that are known, as often
        as others call them. Raises ``UnsupportedError``.
        """
        sizes: dict[str, int] = {}
        for name in self._callees_first(self._frame.entry):
            known = self._templates.get(name)
            calls = [] if known is not None else _calls(self._frame.functions.get(name), self._bindings)
            copied = sum(sizes.get(callee, 0) for callee, op in calls if op.name == "func.call")
            sizes[name] = copied if known is None else len(known)
        check_size(self._frame.entry, sizes[self._frame.entry])

    def _callees_first(self, start: str) -> list[str]:
        """Functions that ``start`` reaches, callees before callers. Raises ``FormatError`` for recursion."""
        finished: dict[str, None] = {}
        active: dict[str, None] = {}
        pending: list[tuple[str, bool]] = [(start, False)]
        while pending:
            name, is_done = pending.pop()
            if is_done:
                del active[name]
                finished[name] = None
                continue
            if name in finished or name in active:
                continue
            active[name] = None
            pending.append((name, True))
            for callee in _callees(self._frame.functions.get(name), self._bindings):
                if callee in active:
                    raise _cycle(list(active), callee)
                if callee not in finished:
                    pending.append((callee, False))
        return list(finished)


def _cycle(active: Sequence[str], callee: str) -> FormatError:
    cycle = [*active[active.index(callee) :], callee]
    return FormatError(
        f"functions call one another in a cycle: {' -> '.join(f'@{name}' for name in cycle[:20])}",
        position=f"function @{callee}",
        hint="StableHLO has no recursion; write the repetition as a while loop",
    )


def _calls(function: Operation | None, bindings: Bindings) -> list[tuple[str, Operation]]:
    """Calls in a function: callee and call operation."""
    found: list[tuple[str, Operation]] = []
    if function is None:
        return found
    advance: object = bindings.ir.WalkResult.ADVANCE

    def visit(op: Operation) -> object:
        attribute = CALLEES.get(op.name)
        if attribute is not None:
            found.append((text_of(op, attribute), op))
        return advance

    function.walk(visit)
    return found


def _callees(function: Operation | None, bindings: Bindings) -> list[str]:
    return list(dict.fromkeys(callee for callee, _ in _calls(function, bindings) if callee))


def call_sites(frame: Frame, bindings: Bindings) -> Mapping[str, Sequence[Operation]]:
    """The call operations of each function."""
    sites: dict[str, list[Operation]] = {}
    for function in frame.functions.values():
        for callee, op in _calls(function, bindings):
            sites.setdefault(callee, []).append(op)
    return sites
