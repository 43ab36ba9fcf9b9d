"""Properties of a module outside of its operations: entry function, functions, donated arguments, meshes,
devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from hespas.converters.program_bytes import program_bytes
from hespas.converters.stablehlo.attributes import CALLEES
from hespas.converters.stablehlo.communication import DeviceMesh, read_mesh
from hespas.converters.stablehlo.mlir import (
    Bindings,
    MlirBlock,
    MlirModule,
    MlirOperation,
    int_of,
    members_of,
    place_of,
    quoted,
    text_of,
)
from hespas.converters.stablehlo.types import TypeTable
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._mlir import ir

__all__ = ["ModuleHeader", "call_sites", "function_calls", "read_header"]

_DONATED = ("tf.aliasing_output", "jax.buffer_donor")


class ModuleHeader(NamedTuple):
    """Properties that a module states outside of its operations.

    ``num_replicas`` and ``num_partitions`` are 0 if not stated. ``donated`` are indices of entry arguments
    whose buffers may be overwritten. ``is_replay`` is True if Hespas wrote the program from a graph.
    ``ranks`` are then the ranks of the job that it represents, empty for all.
    """

    name: str
    functions: Mapping[str, MlirOperation]
    entry: str
    donated: frozenset[int]
    meshes: Mapping[str, DeviceMesh]
    num_replicas: int
    num_partitions: int
    is_replay: bool
    ranks: str = ""

    def body(self, name: str) -> MlirBlock | None:
        """Return the entry block of a function; None if it has no body or does not exist."""
        function = self.functions.get(name)
        if function is None or not len(function.regions[0].blocks):
            return None
        return function.regions[0].blocks[0]

    def program_bytes(self, types: TypeTable) -> str:
        """Return the memory of the program as text for the metadata of the graph: the sizes [bytes] of the
        arguments, of the results, and of the arguments whose buffers results may overwrite.
        """
        entry = self.functions[self.entry]
        signature = cast("ir.FunctionType", cast("ir.TypeAttr", entry.attributes["function_type"]).value)
        inputs, results = (
            [sum(tensor.bytes for tensor in types.get(kind).tensors) for kind in kinds]
            for kinds in (signature.inputs, signature.results)
        )
        return program_bytes(inputs, results, self.donated)


def read_header(module: MlirModule, bindings: Bindings, end: str) -> ModuleHeader:
    """Return the header of a module. ``end`` is the position of the end of the module, for messages.

    Raises ``FormatError`` if the module has no function to run or no unique one.
    """
    top = module.operation
    block = module.body
    while len(block.operations) == 1 and block.operations[0].operation.name == "builtin.module":
        top = block.operations[0].operation
        block = top.regions[0].blocks[0]
    functions: dict[str, MlirOperation] = {}
    meshes: dict[str, DeviceMesh] = {}
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
            hint="write one file per module (MLIR's tests separate modules by '// -----')",
        )
    entry = _entry(functions, end)
    arguments = [cast("ir.DictAttr", row) for row in members_of(functions[entry], "arg_attrs")]
    marks = top.attributes.get("hespas.replay")
    ranks: object = b""  # of a replay of one rank class; the text may hold any bytes
    if marks is not None and hasattr(marks, "__contains__"):
        entries = cast("ir.DictAttr", marks)
        ranks = getattr(entries["ranks"], "value_bytes", b"") if "ranks" in entries else b""
    return ModuleHeader(
        text_of(top, "sym_name") or entry,
        functions,
        entry,
        frozenset(number for number, row in enumerate(arguments) if any(name in row for name in _DONATED)),
        meshes,
        _positive(top, "mhlo.num_replicas"),
        _positive(top, "mhlo.num_partitions"),
        "hespas.replay" in top.attributes,
        ranks.decode("utf-8", "backslashreplace") if isinstance(ranks, bytes) else "",
    )


def _positive(top: MlirOperation, name: str) -> int:
    hint = "write an integer of at least 1"
    try:
        count = int_of(top, name, 0)
    except (AttributeError, ValueError) as error:
        raise FormatError(f"{name} is not an integer", position=_header_position(top), hint=hint) from error
    if count < 0 or (name in top.attributes and count == 0):
        raise FormatError(
            f"{name} is {count}, but must be at least 1", position=_header_position(top), hint=hint
        )
    return count


def _header_position(top: MlirOperation) -> str:
    return f"module header ({place_of(str(top.location))})"


def _entry(functions: Mapping[str, MlirOperation], end: str) -> str:
    """Return the name of the function to run: ``main``, else the only public function with a body."""
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
            hint="check the export: a StableHLO module needs a function @main",
        )
    listed = ", ".join(f"@{quoted(name, 60)}" for name in (public or list(bodies))[:8])
    raise FormatError(
        f"no function @main, but {len(public)} public functions: {listed}",
        position=end,
        hint="name the step function main",
    )


def function_calls(function: MlirOperation | None, bindings: Bindings) -> list[tuple[str, MlirOperation]]:
    """Return the calls in a function: callee and call operation."""
    calls: list[tuple[str, MlirOperation]] = []
    if function is None:
        return calls
    advance: object = bindings.ir.WalkResult.ADVANCE

    def visit(op: MlirOperation) -> object:
        attribute = CALLEES.get(op.name)
        if attribute is not None:
            calls.append((text_of(op, attribute), op))
        return advance

    function.walk(visit)
    return calls


def call_sites(header: ModuleHeader, bindings: Bindings) -> Mapping[str, Sequence[MlirOperation]]:
    """Return the call operations of each function."""
    sites: dict[str, list[MlirOperation]] = {}
    for function in header.functions.values():
        for callee, op in function_calls(function, bindings):
            sites.setdefault(callee, []).append(op)
    return sites
