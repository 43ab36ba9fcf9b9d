"""Positions of a program's operations: the node ids of Model Explorer.

Model Explorer (its adapter 0.2.1) shows one graph per function and numbers the operations of a function from
0, in the order in which they start. Terminators count. It shows the regions of an operation of the function
itself, such as the body of a loop. It shows the regions of a nested operation only if that is an operation of
Shardy (``sdy``). An operation in any other region, such as the body of a loop in a loop, is part of the
operation around it and has its position here.
"""

from __future__ import annotations

import json
from itertools import count
from typing import NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo import ATTACHMENT
from hespas.converters.stablehlo.mlir import Bindings, MlirModule, MlirOperation
from hespas.converters.stablehlo.module import read_header
from hespas.converters.stablehlo.sandbox import read_in_sandbox
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.columns import IntArray
from hespas.graph.errors import UnsupportedError

__all__ = ["FUNCTIONS", "NumberedProgram", "OpPosition", "number_operations", "numbered_program"]

FUNCTIONS = "functions"
"""Key of the metadata with the names of the functions, a JSON list, of a program with numbered operations."""


class OpPosition(NamedTuple):
    """Position of an operation: its function, and its number in the function."""

    function: str
    number: int


class NumberedProgram(NamedTuple):
    """Graph of a program as it is read, and the positions of its nodes.

    ``paths[path[node]]`` has the position of the operation, preceded by the positions of the calls that lead
    to it, outermost first. A node that the reader adds has the path of the call around it (empty: none).
    """

    graph: OpGraph
    path: IntArray
    paths: list[tuple[OpPosition, ...]]


def number_operations(module: MlirModule, bindings: Bindings) -> list[str]:
    """Replace the location of each operation by a name with its position: ``2:7`` is operation 7 of
    function 2. Return the names of the functions.

    The reader prepends the names of calls to the names of the operations in the called function.
    """
    functions = read_header(module, bindings, "").functions
    name, context = bindings.ir.Location.name, module.operation.location.context
    for index, function in enumerate(functions.values()):
        numbers = count()
        for top in _inner(function):
            # Operations, and the number of the shown operation around a hidden one (-1: it is shown).
            pending = [(top, -1)]
            while pending:
                op, around = pending.pop()
                number = around if around >= 0 else next(numbers)
                op.location = name(f"{index}:{number}", context=context)
                shows_regions = around < 0 and (op is top or op.name.startswith("sdy."))
                pending += [(inner, -1 if shows_regions else number) for inner in reversed(_inner(op))]
    return list(functions)


def _inner(op: MlirOperation) -> list[MlirOperation]:
    """Return the operations in the regions of an operation."""
    blocks = (block for region in op.regions for block in region.blocks)
    return [view.operation for block in blocks for view in block.operations]


def numbered_program(workload: Workload) -> NumberedProgram:
    """Return the program that a workload was read from, with the positions of its operations. The program is
    read again, in a child process.

    Raises ``UnsupportedError`` for a workload that was not read from one StableHLO program.
    """
    programs = [
        graph.attachments[ATTACHMENT] for graph in workload.classes if ATTACHMENT in graph.attachments
    ]
    if len(workload.classes) > 1 or not programs:
        count_of_programs = f"{len(programs)} StableHLO programs" if programs else "no StableHLO program"
        raise UnsupportedError(
            f"operations cannot be numbered: the workload {workload.name} has {count_of_programs}",
            hint="read one StableHLO program (.mlir or .mlirbc)",
        )
    replicas = workload.metadata.get("num_replicas", "")
    options = ReadOptions(
        num_devices=workload.num_ranks, num_replicas=int(replicas) if replicas.isdecimal() else None
    )
    numbered = read_in_sandbox(programs[0], workload.name, options, Diagnostics(), numbers_operations=True)
    names: list[str] = json.loads(numbered.metadata[FUNCTIONS])
    (graph,) = numbered.classes
    texts, path = np.unique(graph.framework_id, return_inverse=True)
    paths: list[tuple[OpPosition, ...]] = []
    for text in texts.tolist():
        parts = (part.partition(":") for part in graph.strings[text].split("/") if part)
        paths.append(tuple(OpPosition(names[int(index)], int(number)) for index, _, number in parts))
    return NumberedProgram(graph, path, paths)
