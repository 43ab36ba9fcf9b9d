"""Costs of events that carry out instructions of compiled programs which their profile brings along.

An event of XLA names its instruction, and the profile holds the HLO of its module. Several kernels may carry
out one instruction: its cost is on the longest of them, and the others cost nothing of their own.
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

_ATTACHED = "hlo/"
_FIGURES = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")


def names_instruction(profile: Profile) -> BoolArray:
    """Mark events that name an instruction of a compiled program."""
    return (profile.module_row > 0) & (profile.op_row > 0)


class _Instruction(NamedTuple):
    """An instruction: nodes of the program that are its executions, as rows of ``graph``."""

    graph: OpGraph
    nodes: list[int]

    @property
    def executions(self) -> int:
        """Return the executions of an instruction in one run of the program; 1 where that is unknown."""
        runs = float(np.nansum(self.graph.multiplicity[self.nodes]))
        return max(round(runs), 1) if np.isfinite(runs) else 1


def _instructions(profile: Profile, diagnostics: Diagnostics) -> dict[tuple[str, str], _Instruction]:
    """The instructions of the modules that ran, by module and name."""
    found: dict[tuple[str, str], _Instruction] = {}
    for module, workload in _programs(profile, diagnostics):
        graph = workload.classes[0]
        for node, row in enumerate(graph.name_row.tolist()):
            if row:
                key = module, graph.strings[row]
                found.setdefault(key, _Instruction(graph, [])).nodes.append(node)
    return found


def _programs(profile: Profile, diagnostics: Diagnostics) -> Iterator[tuple[str, Workload]]:
    """The compiled programs of a profile that ran in it."""
    ran = {profile.strings[row] for row in np.unique(profile.module_row).tolist()}
    read = load_format("hlo").read
    for name, data in profile.attachments.items():
        module = name.removeprefix(_ATTACHED)
        if not name.startswith(_ATTACHED) or module not in ran or read is None:
            continue
        with TemporaryDirectory(prefix="hespas-") as folder:
            path = Path(folder) / "module.pb"
            path.write_bytes(data)
            try:
                value = read(path, ReadOptions(), Diagnostics())
            except HespasError as error:
                message = f"the HLO of module {module} is left out: {error.message}"
                diagnostics.warning("measured-ops.unreadable-module", profile.name, message)
                continue
        if isinstance(value, Workload):
            yield module, value


def with_instruction_costs(
    profile: Profile, graph: OpGraph, node: IntArray, work: BoolArray, diagnostics: Diagnostics
) -> OpGraph:
    """The graph with costs of instructions. ``node`` is the node of each event, ``work`` marks events that
    compute; each that names an instruction has a node of its own. O(events log events + instructions).
    """
    rows = np.flatnonzero(names_instruction(profile) & work)
    if not len(rows) or not any(name.startswith(_ATTACHED) for name in profile.attachments):
        return graph
    known = _instructions(profile, diagnostics)
    keys, place = distinct_rows(profile.module_row[rows], profile.op_row[rows])
    columns: dict[str, Any] = {name: getattr(graph, name).copy() for name in _FIGURES}
    op_class, rate = graph.op_class.copy(), graph.rate_dtype.copy()
    tables = [graph.contractions]
    for number, (module, op) in enumerate(keys):
        found = known.get((profile.strings[module], profile.strings[op]))
        if found is None:
            continue
        events = rows[place == number]
        program, source = found.graph, found.nodes[0]
        stated = int(program.op_class[source])
        if stated not in (OpClass.UNKNOWN, OpClass.FREE):
            op_class[node[events]] = stated
        rate[node[events]] = program.rate_dtype[source]
        main = _longest_of_each(profile, events, found.executions)
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


def _longest_of_each(profile: Profile, events: IntArray, executions: int) -> IntArray:
    """The longest event of each execution: events of a run are cut, in order of start, into as many equal
    parts as the program executes the instruction; where that does not fit, each event is one.
    """
    order = events[np.lexsort((profile.start_ns[events], profile.run[events], profile.rank[events]))]
    _, run = distinct_rows(profile.rank[order], profile.run[order])
    sizes = np.bincount(run)
    if (profile.run[order] < 0).any() or (sizes % executions).any():
        return order
    within = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[run]
    part = run.astype(np.int64) * executions + within // (sizes[run] // executions)
    by_time = np.lexsort((-np.arange(len(order)), profile.duration_ns[order], part))
    last = np.flatnonzero(np.append(np.diff(part[by_time]) > 0, True))
    longest: IntArray = order[by_time[last]]
    return longest
