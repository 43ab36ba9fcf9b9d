"""Costs of events that execute instructions of compiled programs, by the HLO that the profile contains.

An event of XLA names its instruction, and the profile has the HLO of its module. If several kernels execute
one instruction, the longest one has its cost, and the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.registry import load_format
from hespas.graph import ContractionTable, Diagnostics, OpClass, OpGraph, Profile, Workload
from hespas.graph.columns import BoolArray, IntArray, distinct_rows
from hespas.graph.errors import HespasError

__all__ = ["names_instruction", "with_instruction_costs"]

_MODULE_PREFIX = "hlo/"
_FIGURES = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")


def names_instruction(profile: Profile) -> BoolArray:
    """Return a mask of the events that name an instruction of a compiled program."""
    return (profile.module_id > 0) & (profile.op_id > 0)


class _ProgramInstruction(NamedTuple):
    """Instruction of a compiled program that ran in the profile. ``nodes`` are its nodes in ``graph``, the
    graph of that program.
    """

    graph: OpGraph
    nodes: list[int]

    @property
    def executions(self) -> int:
        """Executions of the instruction in one run of the program; 1 if unknown."""
        runs = float(np.nansum(self.graph.executions[self.nodes]))
        return max(round(runs), 1) if np.isfinite(runs) else 1


def _programs(profile: Profile, diagnostics: Diagnostics) -> Iterator[tuple[str, Workload]]:
    """Read the compiled programs of a profile that ran in it."""
    ran = {profile.strings[row] for row in np.unique(profile.module_id).tolist()}
    read = load_format("hlo").read
    for name, data in profile.attachments.items():
        module = name.removeprefix(_MODULE_PREFIX)
        if not name.startswith(_MODULE_PREFIX) or module not in ran or read is None:
            continue
        with TemporaryDirectory(prefix="hespas-") as folder:
            path = Path(folder) / "module.pb"
            path.write_bytes(data)
            try:
                value = read(path, ReadOptions(), Diagnostics())
            except HespasError as error:
                message = f"the HLO of module {module} is ignored: {error.message}"
                diagnostics.warning("measured-ops.unreadable-module", profile.name, message)
                continue
        if isinstance(value, Workload):
            yield module, value


def with_instruction_costs(
    profile: Profile, graph: OpGraph, node: IntArray, work: BoolArray, diagnostics: Diagnostics
) -> OpGraph:
    """Add the costs of XLA instructions to a graph, from the programs in the profile. O(events log events +
    instructions).

    ``node`` is the node of each event, and ``work`` marks events that compute. Each computing event that
    names an instruction has a node of its own.
    """
    rows = np.flatnonzero(names_instruction(profile) & work)
    if not len(rows) or not any(name.startswith(_MODULE_PREFIX) for name in profile.attachments):
        return graph
    instructions: dict[tuple[str, str], _ProgramInstruction] = {}
    for module_name, workload in _programs(profile, diagnostics):
        program = workload.classes[0]
        for program_node, row in enumerate(program.name_id.tolist()):
            if row:
                key = module_name, program.strings[row]
                instructions.setdefault(key, _ProgramInstruction(program, [])).nodes.append(program_node)
    keys, index = distinct_rows(profile.module_id[rows], profile.op_id[rows])
    columns: dict[str, Any] = {name: getattr(graph, name).copy() for name in _FIGURES}
    op_class, rate = graph.op_class.copy(), graph.rate_dtype.copy()
    tables = [graph.contractions]
    for number, (module, op) in enumerate(keys):
        instruction = instructions.get((profile.strings[module], profile.strings[op]))
        if instruction is None:
            continue
        events = rows[index == number]
        program, source = instruction.graph, instruction.nodes[0]
        program_class = int(program.op_class[source])
        if program_class not in (OpClass.UNKNOWN, OpClass.FREE):
            op_class[node[events]] = program_class
        rate[node[events]] = program.rate_dtype[source]
        executions = instruction.executions
        order = np.lexsort((profile.start_ns[events], profile.run[events], profile.rank[events]))
        main = events[order]
        _, run = distinct_rows(profile.rank[main], profile.run[main])
        sizes = np.bincount(run)
        if (profile.run[main] >= 0).all() and not (sizes % executions).any():
            # The longest event of each execution has the cost.
            within = np.arange(len(main)) - (np.cumsum(sizes) - sizes)[run]
            part = run.astype(np.int64) * executions + within // (sizes[run] // executions)
            by_time = np.lexsort((-np.arange(len(main)), profile.duration_ns[main], part))
            last = np.flatnonzero(np.append(np.diff(part[by_time]) > 0, True))
            main = main[by_time[last]]
        for name in _FIGURES:
            columns[name][node[events]] = 0.0
            columns[name][node[main]] = getattr(program, name)[source]
        products = np.flatnonzero(program.contractions.node == source)
        chosen = np.tile(products, len(main))
        on = np.repeat(node[main], len(products)).astype(np.int32)
        tables.append(program.contractions.take(chosen, on))
    table = ContractionTable.joined(tables)
    order = np.argsort(table.node, kind="stable")
    return replace(
        graph,
        op_class=op_class,
        rate_dtype=rate,
        contractions=table.take(order, table.node[order]),
        **columns,
    )
