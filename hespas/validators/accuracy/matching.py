"""Matching of the events of a profile to the nodes of a program.

Rules, strongest first; a rule applies only to events that the rules before it left unmatched:

1. The event names an instruction of the program itself (an HLO program and XLA's ``hlo_op``). One or two
   equal names are chance: at least half of the names of a module must be names of the program. If the profile
   contains the module, its results must have the same shapes, or nothing of it is matched.
2. The event names an instruction of a compiled module that the profile contains. The metadata of the
   instruction and of everything fused into it names the operations of the source program (by name, then by
   source line). Names within a region of manual sharding lack their prefix and are matched by suffix.
3. The compiled module has the structure of the program: operations of equal kind and type with the same
   operands and users (:mod:`~hespas.validators.accuracy.structure`).
4. The operation and shapes of the event, or its operation alone, occur in as many nodes, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from hespas.converters import ReadOptions
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.provenance import Provenance, module_provenance
from hespas.converters.hlo.reader import source_of, workload_of
from hespas.graph import Diagnostics, OpClass, OpGraph, Profile, RegionKind, Workload
from hespas.graph.columns import IntArray
from hespas.graph.errors import HespasError
from hespas.validators.accuracy.coverage import RULES, EventKey, Matching, group_keys
from hespas.validators.accuracy.structure import (
    OTHER_PROGRAM,
    ProgramSizes,
    join_by_structure,
    regions_around,
)

__all__ = [
    "NO_MODULE",
    "NO_NAMES",
    "OTHER_PROGRAM",
    "WITH_NAMES",
    "check_program",
    "compiled_module",
    "match_program",
    "other_modules",
]

NO_MODULE = "match.no-module"
NO_NAMES = "match.no-names"
WITH_NAMES = "write it again as lowered.as_text(debug_info=True), or with jax.export"
"""Advice for programs without the names by which events are matched."""
_MOST_LISTED = 5

_INSTRUCTION, _OP_NAME, _SOURCE_LINE, _STRUCTURE = range(4)
_ATTACHED = "hlo/"
_COMMUNICATES = re.compile(
    r"(wrapped_)?(ragged-)?(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast|send|recv)(-start|-done)?\b"
)
_MATMULS = frozenset({int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION)})
_MOVERS = frozenset({int(OpClass.FREE), int(OpClass.MOVE)})
_SHARED = (
    OpClass.FREE,
    OpClass.ELEMENTWISE,
    OpClass.TRANSCENDENTAL,
    OpClass.BROADCAST,
    OpClass.GENERATE,
    OpClass.QUANTIZE,
    OpClass.SLICE,
    OpClass.MOVE,
    OpClass.CONTROL,
)
"""Classes that compilers fuse into each of their users."""


def match_program(
    graph: OpGraph,
    profile: Profile,
    diagnostics: Diagnostics,
    *,
    is_own: bool = False,
    sizes: ProgramSizes | None = None,
) -> Matching:
    """Match events of ``profile`` to nodes of ``graph``; ``diagnostics`` receive the events without a match.

    ``is_own`` is True if the program was read from the profile, so that they need not be compared. ``sizes``
    are the bytes and devices that the program declares, if it declares any.

    A module that cannot be read is treated as absent and raises no error. O(nodes + events + links).
    """
    # Number the distinct (module, operation) pairs of the events; -1 for events without an operation name.
    pair_row = profile.module_id.astype(np.int64) << 32 | profile.op_id.astype(np.int64)
    pairs, index = np.unique(pair_row, return_inverse=True)
    strings = profile.strings
    names = [(strings[int(pair) >> 32], strings[int(pair) & 0xFFFFFFFF]) for pair in pairs.tolist()]
    named = np.array([bool(op) for _, op in names], np.bool_)
    event_key = np.where(named[index], index, -1).astype(np.int64) if names else index.astype(np.int64)
    # An unrolled loop has several equal nodes of one name. A name that different nodes share (``aten::mm``)
    # is not the name of an instruction.
    by_row: dict[int, list[int]] = {}
    for node, row in enumerate(graph.name_id.tolist()):
        if row:
            by_row.setdefault(row, []).append(node)
    instructions: dict[str, list[int]] = {}
    for row, nodes in by_row.items():
        signatures = {
            (int(graph.op_id[node]), graph.operands.row(node).tobytes(), graph.results.row(node).tobytes())
            for node in (nodes if len(nodes) > 1 else ())
        }
        if len(signatures) <= 1:
            instructions[graph.strings[row]] = nodes
    operations: dict[str, list[str]] = {}
    for module, op in names:
        if op:
            operations.setdefault(module, []).append(op)
    own = {
        module: ops
        for module, ops in operations.items()
        if 2 * sum(op in instructions for op in ops) >= len(ops)
    }
    others = set[str]() if is_own else other_modules(graph, profile, own, instructions, diagnostics)
    keys = _match_by_name(graph, profile, names, (instructions, own.keys() - others, others), diagnostics)
    if not is_own:
        keys, different = join_by_structure(graph, profile, keys, (sizes, others), diagnostics)
        others |= different
    # Events without an operation name have key -1: the last element.
    is_settled = np.array([*(bool(key.nodes) or key.module in others for key in keys), True], np.bool_)
    ordered, more = _match_in_order(graph, profile, np.flatnonzero(~is_settled[event_key]), len(keys))
    num_named = len(keys)
    keys.extend(more)
    event_key = np.where(ordered >= 0, ordered, event_key)
    shared = np.isin(graph.op_class, [int(op_class) for op_class in _SHARED])
    communicates = np.isin(graph.op_class, (int(OpClass.COLLECTIVE), int(OpClass.P2P)))
    key_group, node_group = group_keys(keys, shared, communicates)
    matching = Matching(
        keys=tuple(keys),
        event_key=event_key,
        event_group=np.append(key_group, -1)[event_key],
        node_group=node_group,
        num_groups=int(key_group.max(initial=-1)) + 1,
    )
    attached = {name.removeprefix(_ATTACHED) for name in profile.attachments}
    if not is_own and not bool((graph.framework_id > 0).any()):
        diagnostics.warning(
            NO_NAMES,
            graph.name,
            "the operations of the program have no names, so instructions of the profile cannot be matched "
            f"by name: a plain as_text() omits them; {WITH_NAMES}",
            count=sum(not key.nodes and key.module in attached - others for key in keys[:num_named]),
        )
    _warn_of_events(graph, profile, matching, attached | others | own.keys(), diagnostics)
    return matching


def _warn_of_events(
    graph: OpGraph, profile: Profile, matching: Matching, modules: set[str], diagnostics: Diagnostics
) -> None:
    """Warn if instructions have more events than a single run has, and if events belong to modules that are
    not in ``modules``.

    In the first case, several runs without run numbers would count as one long run. In the second case, the
    instruction names do not identify operations.
    """
    rows = np.flatnonzero((profile.run < 0) & (matching.event_key >= 0))
    rank_and_key = profile.rank[rows].astype(np.int64) << 32 | matching.event_key[rows]
    distinct, counts = np.unique(rank_and_key, return_counts=True)
    pairs: list[tuple[int, int]] = np.stack((distinct & 0xFFFFFFFF, counts), axis=1).tolist()
    for number, count in pairs:
        key = matching.keys[number]
        if key.rule == _INSTRUCTION and count > graph.executions[list(key.nodes)].sum():
            diagnostics.warning(
                "match.runs-unknown",
                profile.name,
                f"{key.op} has {count:,} events, more than one run of the program, but the events have no "
                "run number: all count as one run",
            )
    unmatched = matching.event_group < 0
    used: list[int] = np.unique(profile.module_id[unmatched & (profile.op_id > 0)]).tolist()
    absent = [row for row in used if profile.strings[row] and profile.strings[row] not in modules]
    listed = ", ".join(profile.strings[row][:80] for row in absent[:_MOST_LISTED])
    diagnostics.warning(
        NO_MODULE,
        profile.name,
        f"events name instructions of compiled programs ({listed}) that this file does not contain: their "
        "operations are unknown",
        count=int((unmatched & np.isin(profile.module_id, absent)).sum()),
    )


def _match_by_name(
    graph: OpGraph,
    profile: Profile,
    names: Sequence[tuple[str, str]],
    program: tuple[Mapping[str, list[int]], set[str], set[str]],
    diagnostics: Diagnostics,
) -> list[EventKey]:
    """Match the (module, operation) ``names`` of events to nodes by instruction name or by framework name
    (the first two of :data:`RULES`).

    ``program`` has three entries: nodes by instruction name, modules that are the program itself, and modules
    that only have the same names.
    """
    instructions, own, others = program
    modules: dict[str, Mapping[str, Provenance]] = {}
    for name, data in profile.attachments.items():
        if name.startswith(_ATTACHED):
            try:
                modules[name.removeprefix(_ATTACHED)] = module_provenance(data, name)
            except HespasError as error:
                diagnostics.warning(
                    "match.unreadable-module", profile.name, f"module {name}: {error.message}"
                )
    nodes_of = _SourceNodes(graph)
    keys: list[EventKey] = []
    for module, op in names:
        nodes: Sequence[int] = instructions.get(op, ()) if module in own else ()
        rule, inferred = _INSTRUCTION, False
        origin: Provenance | None = None
        if not nodes and module not in others:
            if module:
                origin = modules.get(module, {}).get(op)
            else:  # use the instruction if all modules that have one of this name agree
                candidates = {provenance[op] for provenance in modules.values() if op in provenance}
                origin = candidates.pop() if len(candidates) == 1 else None
        if origin is not None:
            nodes, rule = nodes_of.carried_out(origin)
            inferred = origin.inferred
        keys.append(
            EventKey(
                module=module,
                op=op,
                nodes=tuple(nodes),
                rule=rule if nodes else -1,
                inferred=inferred,
                communicates=_COMMUNICATES.match(op) is not None,
            )
        )
    return keys


class _SourceNodes:
    """Nodes of a source program by framework name and by source line."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._by_name: dict[str, list[int]] = {}
        self._by_line: dict[str, list[int]] = {}
        self._manual: dict[str, list[int]] = {}
        """By framework name, within regions of manual sharding."""
        in_manual = regions_around(graph, RegionKind.MANUAL)
        for node, (name, source) in enumerate(
            zip(graph.framework_id.tolist(), graph.source_id.tolist(), strict=True)
        ):
            if name:
                self._by_name.setdefault(graph.strings[name], []).append(node)
                if in_manual[node]:
                    self._manual.setdefault(graph.strings[name], []).append(node)
            if source:
                self._by_line.setdefault(_line(graph.strings[source]), []).append(node)

    def carried_out(self, origin: Provenance) -> tuple[Sequence[int], int]:
        """Return the nodes that an instruction carries out, found by framework name or else by source line,
        and the matching rule.
        """
        by_name: list[int] = []
        for part in origin.origins:
            nodes = self._by_name.get(part.name, ())
            suffix = part.name
            while not nodes and self._manual and "/" in suffix:
                suffix = suffix.partition("/")[2]
                nodes = self._manual.get(suffix, ())
            by_name.extend(nodes)
            if part.multiplies:
                by_name.extend(self._matmuls_behind(nodes))
        if by_name:
            return list(dict.fromkeys(by_name)), _OP_NAME
        by_line = [node for part in origin.origins for node in self._by_line.get(_line(part.source), ())]
        return list(dict.fromkeys(by_line)), _SOURCE_LINE

    def _matmuls_behind(self, nodes: Sequence[int]) -> list[int]:
        """Return the matmuls whose results ``nodes`` only copy or transpose; empty if a matmul is among
        ``nodes``.

        XLA merges a transpose into the matmul before it, and gives the matmul the name of the transpose.
        """
        graph = self._graph
        matmuls: list[int] = []
        pending, seen = list(nodes), set(nodes)
        while pending:
            node = pending.pop()
            if graph.op_class[node] in _MATMULS:
                matmuls.append(node)
            elif graph.op_class[node] in _MOVERS:
                fresh = [dep for dep in graph.data_deps.row(node).tolist() if dep not in seen]
                seen.update(fresh)
                pending.extend(fresh)
        return [] if any(node in nodes for node in matmuls) else matmuls


def _line(source: str) -> str:
    """Return the ``file:line`` part of a source position ``file:line:column``."""
    file, _, last = source.rpartition(":")
    before = file.rpartition(":")[2]
    return file if last.isdigit() and before.isdigit() else source


_NAMESPACES = frozenset({"aten", "prims"})
_SIGNATURE, _ORDER = RULES.index("signature"), RULES.index("order")


def _match_in_order(
    graph: OpGraph, profile: Profile, unmatched: IntArray, first_key: int
) -> tuple[IntArray, list[EventKey]]:
    """Match the k-th event of an operation in each rank and run to the k-th node of that operation (the last
    two of :data:`RULES`).

    All ranks and runs must have as many events as the program has nodes. Events are matched first by
    operation and operand shapes, then by operation alone. In a loop of m iterations the nodes of the body
    repeat m times.

    ``unmatched`` lists the unmatched events. Returns the key of each event, numbered from ``first_key`` on
    (-1: unmatched), and the keys. O(nodes + events log events).
    """
    event_key = np.full(len(profile), -1, np.int64)
    keys: list[EventKey] = []
    is_taken = np.zeros(len(graph), np.bool_)
    for rule in (_SIGNATURE, _ORDER):
        with_shapes = rule == _SIGNATURE
        strings, types = graph.strings, graph.types
        names = {row: _base_name(strings[row]) for row in np.unique(graph.op_id).tolist()}
        operands = graph.operands.to_lists() if with_shapes else []
        nodes: dict[tuple[str, str], list[int]] = {}
        runs = graph.executions != 0
        for node, row in enumerate(graph.op_id.tolist()):
            if is_taken[node] or not runs[node]:
                continue
            shapes = ""
            if with_shapes and operands[node]:
                shapes = ",".join(f"[{','.join(map(str, types.shape(kind)))}]" for kind in operands[node])
                shapes = f"[{shapes}]"
            if shapes or not with_shapes:
                nodes.setdefault((names[row], shapes), []).append(node)
        events_of = _events_by_signature(profile, unmatched, with_shapes=rule == _SIGNATURE)
        for signature, events in events_of.items():
            candidates = nodes.get(signature, ())
            positions = _positions(graph, profile, events, candidates) if candidates else None
            if positions is None:
                continue
            event_key[events] = first_key + len(keys) + positions
            keys.extend(EventKey(module="", op=signature[0], nodes=(node,), rule=rule) for node in candidates)
            is_taken[list(candidates)] = True
        unmatched = unmatched[event_key[unmatched] < 0]
    return event_key, keys


def _base_name(name: str) -> str:
    """Return ``mm`` for ``aten::mm``, ``aten::mm.out``, ``aten.mm.default`` and ``stablehlo.mm``.

    The number of an instruction (``dot.3``) is not removed.
    """
    space, colons, rest = name.rpartition("::")
    if colons:
        return rest.partition(".")[0] or space
    first, _, rest = name.partition(".")
    if first in _NAMESPACES and rest:
        return rest.partition(".")[0]
    last = name.rpartition(".")[2]
    return name if last.isdigit() else last


def _events_by_signature(
    profile: Profile, unmatched: IntArray, *, with_shapes: bool
) -> dict[tuple[str, str], IntArray]:
    """Return the unmatched events of each operation (with ``with_shapes``, of each operation and shapes), in
    order of rank, run and start.
    """
    rows = profile.op_id[unmatched].astype(np.int64)
    shapes = profile.shapes_id[unmatched].astype(np.int64) if with_shapes else np.zeros_like(rows)
    keys, index = np.unique(rows << 32 | shapes, return_inverse=True)
    numbers: dict[tuple[str, str], int] = {}  # several spellings may be the same operation
    same = np.full(len(keys), -1, np.int64)
    for row, key in enumerate(keys.tolist()):
        name, shape = profile.strings[key >> 32], profile.strings[key & 0xFFFFFFFF]
        if name and (shape or not with_shapes):
            same[row] = numbers.setdefault((_base_name(name), shape.replace(" ", "")), len(numbers))
    index = same[index]
    order = np.lexsort((profile.start_ns[unmatched], profile.run[unmatched], profile.rank[unmatched], index))
    bounds = np.searchsorted(index[order], np.arange(len(numbers) + 1))
    return {
        signature: unmatched[order[bounds[number] : bounds[number + 1]]]
        for signature, number in numbers.items()
    }


def _positions(graph: OpGraph, profile: Profile, events: IntArray, nodes: Sequence[int]) -> IntArray | None:
    """Return for each event the index in ``nodes`` of the node that it carries out. Events are counted from 0
    in each rank and run.

    Returns None if a rank and run does not have as many events as the nodes have executions, or if the nodes
    belong to different loops.
    """
    rows = list(nodes)
    executions = graph.executions[rows]
    if len(set(graph.region[rows].tolist())) > 1 and bool((executions != 1).any()):
        return None
    expected = float(executions.sum())
    rank_and_run = (
        profile.rank[events].astype(np.int64) << 32 | profile.run[events].astype(np.int64) & 0xFFFFFFFF
    )
    _, first, counts = np.unique(rank_and_run, return_index=True, return_counts=True)
    if bool((counts != expected).any()):
        return None
    starts: IntArray = np.repeat(np.sort(first), counts).astype(np.int64)
    return (np.arange(len(events), dtype=np.int64) - starts) % len(nodes)


_LEAST_ALIKE = 0.9
"""Least share of instructions with results of equal shape: below it, another program ran."""

_MOST_FLOPS_RATIO = 2.0
"""Largest factor by which compilers change the FLOPs of matmuls."""


def compiled_module(profile: Profile, module: str) -> Workload | None:
    """Return a module that is attached to the profile; None if it is missing or cannot be read."""
    data = profile.attachments.get(_ATTACHED + module)
    if data is None:
        return None
    try:
        return workload_of(parse_module(source_of(data, module)), ReadOptions(), Diagnostics())
    except (HespasError, ValueError):  # ValueError: of an attribute; matching by name reports it
        return None


def other_modules(
    graph: OpGraph,
    profile: Profile,
    own: Mapping[str, Sequence[str]],
    instructions: Mapping[str, Sequence[int]],
    diagnostics: Diagnostics,
) -> set[str]:
    """Return the modules in ``own`` that are another program with similar names, because their results have
    other shapes.

    ``own`` maps modules to the names of the instructions that ran; at least half of a module's names are also
    names of the program. ``instructions`` maps the program's names to nodes. Warns of each such module. Also
    warns of a module without HLO if more than a tenth of its names are not in the program.
    """
    others: set[str] = set()
    for module, ran in own.items():
        shared = [op for op in ran if op in instructions]
        compiled = compiled_module(profile, module)
        if compiled is None:
            if len(shared) < _LEAST_ALIKE * len(ran):
                diagnostics.warning(
                    OTHER_PROGRAM,
                    profile.name,
                    f"module {module or '(unnamed)'}: the program has only {len(shared):,} of the "
                    f"{len(ran):,} instructions that ran: is it the program that ran?",
                )
            continue
        module_graph = compiled.classes[0]
        nodes = {module_graph.node_name(node): node for node in range(len(module_graph))}
        alike = 0
        for op in shared:
            if op in nodes:
                expected, actual = _results(graph, instructions[op][0]), _results(module_graph, nodes[op])
                alike += expected == actual or not expected or not actual  # unknown results do not differ
        if alike < _LEAST_ALIKE * len(shared):
            others.add(module)
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"module {module}: another program ran: only {alike:,} of {len(shared):,} instructions of "
                "equal name have results of equal shape; the module is not matched",
            )
    return others


def _results(graph: OpGraph, node: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return element type and shape of each result of a node."""
    types = graph.types
    rows: list[int] = graph.results.row(node).tolist()
    elements = [types.dtype_of(row) for row in rows]
    return [
        ("" if element is None else element.name, tuple(types.shape(row)))
        for element, row in zip(elements, rows, strict=True)
    ]


def check_program(workload: Workload, profile: Profile, diagnostics: Diagnostics) -> None:
    """Warn if modules of ``profile`` differ from the program in the number of devices or in matmul FLOPs.

    All modules of ``profile`` must be matched with the program before. O(modules read).
    """
    for row in np.unique(profile.module_id).tolist():
        module = profile.strings[row]
        compiled = compiled_module(profile, module)
        if compiled is None:
            continue
        # A module without collectives has no device count of its own; the ranks that ran it have one.
        devices = max(compiled.num_ranks, len(np.unique(profile.rank[profile.module_id == row])))
        if devices != workload.num_ranks:
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"module {module} is for {devices:,} ranks, but the program is for {workload.num_ranks:,}: "
                "is it the program that ran?",
            )
            continue
        graph, *others = workload.classes
        if others:
            continue
        expected = _matmul_flops(graph)
        actual = _matmul_flops(compiled.classes[0]) * devices
        # An unpartitioned program has the FLOPs of all devices; one that is partitioned by hand has the FLOPs
        # of one device.
        least, most = expected / _MOST_FLOPS_RATIO, expected * devices * _MOST_FLOPS_RATIO
        if actual and expected and not least <= actual <= most:
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"the matmuls of module {module} have {actual:.3g} FLOPs, but the matmuls of the program "
                f"have {expected:.3g}: is it the program that ran?",
            )


def _matmul_flops(graph: OpGraph) -> float:
    """Return the FLOPs of all matmuls in a step; 0 if some are unknown or are in library calls."""
    if "custom-call" in (graph.strings[row] for row in np.unique(graph.op_id).tolist()):
        return 0.0
    matmuls = graph.contractions
    total = float((matmuls.flops * graph.executions[matmuls.node]).sum())
    return total if np.isfinite(total) else 0.0
