"""The frame of a module: functions, entry, who calls whom, donated arguments, meshes, number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast

from hespas.converters.stablehlo.bindings import Bindings
from hespas.converters.stablehlo.exchange import Mesh, read_mesh
from hespas.converters.stablehlo.mlir import (
    Block,
    Module,
    Operation,
    int_of,
    members_of,
    place_of,
    quoted,
    text_of,
)
from hespas.graph.errors import FormatError

__all__ = ["Frame", "read_frame"]

_DONATED = ("tf.aliasing_output", "jax.buffer_donor")


class _Dictionary(Protocol):
    def __contains__(self, name: str, /) -> bool: ...


class _Entries(_Dictionary, Protocol):
    def __getitem__(self, name: str, /) -> object: ...


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
    ranks: str = ""

    def body(self, name: str) -> Block | None:
        """The entry block of a function, None where it has no body or does not exist."""
        function = self.functions.get(name)
        if function is None or not len(function.regions[0].blocks):
            return None
        return function.regions[0].blocks[0]


def read_frame(module: Module, bindings: Bindings, path: str, end: str) -> Frame:
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
            path=path,
            position=end,
            hint="give each a file of its own (those of MLIR's tests are divided by '// -----')",
        )
    entry = _entry(functions, path, end)
    return Frame(
        text_of(top, "sym_name") or entry,
        functions,
        entry,
        _donated(functions[entry]),
        meshes,
        _positive(top, "mhlo.num_replicas", path),
        _positive(top, "mhlo.num_partitions", path),
        _ranks(top),
    )


def _positive(top: Operation, name: str, path: str) -> int:
    hint = "it must be at least 1"
    try:
        count = int_of(top, name, 0)
    except (AttributeError, ValueError) as error:
        raise FormatError(
            f"{name} is no integer", path=path, position=_header_place(top), hint=hint
        ) from error
    if count < 0 or (name in top.attributes and count == 0):
        raise FormatError(f"{name} = {count}", path=path, position=_header_place(top), hint=hint)
    return count


def _ranks(top: Operation) -> str:
    """The ranks of a replay of one rank class, empty where it does not say. Any bytes may stand there."""
    marks = top.attributes.get("hespas.replay")
    if marks is None or not hasattr(marks, "__contains__"):
        return ""
    entries = cast("_Entries", marks)
    stated = getattr(entries["ranks"], "value_bytes", b"") if "ranks" in entries else b""
    return stated.decode("utf-8", "backslashreplace") if isinstance(stated, bytes) else ""


def _header_place(top: Operation) -> str:
    return f"module header ({place_of(str(top.location))})"


def _entry(functions: Mapping[str, Operation], path: str, end: str) -> str:
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
            path=path,
            position=end,
            hint="expected a StableHLO module with a function @main; was the export interrupted?",
        )
    listed = ", ".join(f"@{quoted(name, 60)}" for name in (public or list(bodies))[:8])
    raise FormatError(
        f"no function @main, and {len(public)} public ones: {listed}",
        path=path,
        position=end,
        hint="name the step function main",
    )


def _donated(entry: Operation) -> frozenset[int]:
    rows = [cast("_Dictionary", row) for row in members_of(entry, "arg_attrs")]
    return frozenset(place for place, row in enumerate(rows) if any(name in row for name in _DONATED))
