"""Matches the nodes of a program to the events of a profile.

Rules, strongest first; each is asked only about what the ones before left:

1. the event names an instruction of the program itself (an HLO program and XLA's ``hlo_op``); one or two
   equal names are chance, so at least half of the names of a module must be the program's, and where the
   profile brings the module along its results must have the same shapes, or nothing of it is matched;
2. the event names an instruction of a compiled module that the profile brings along: its metadata, and those
   of all it fuses, say which operations of the source program it carries out (by name, then by source line);
   within a region of manual sharding, whose names lack what stands before, by the end of the name;
3. the compiled module is made of what the program is made of: operations of equal kind and type that take and
   give the same (:mod:`~hespas.validators.accuracy.structure`);
4. the event's operation and shapes, or its operation alone, are those of as many nodes, in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hespas.converters import ReadOptions
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.provenance import Provenance, module_provenance
from hespas.converters.hlo.reader import source_of, workload_of
from hespas.graph import Diagnostics, OpClass, OpGraph, Profile, RegionKind, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import HespasError
from hespas.validators.accuracy.coverage import RULES, EventKey, Matching, group_keys
from hespas.validators.accuracy.structure import OTHER_PROGRAM, Stated, join_by_structure, regions_around

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
"""What keeps the names that events are matched by."""
_MOST_NAMED = 5

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
    stated: Stated | None = None,
) -> Matching:
    """Match every event of ``profile`` that can be to nodes of ``graph``; ``diagnostics`` tell what cannot.
    ``is_own`` says that the profile itself brought the program along: nobody asks whether it is the one.
    ``stated`` is what the program says of itself, where it says anything.

    Raises nothing: a module that cannot be read counts as absent. O(nodes + events + links).
    """
    names, event_key = _event_keys(profile)
    instructions = _names(graph)
    own = _own_modules(names, instructions)
    others = set[str]() if is_own else other_modules(graph, profile, own, instructions, diagnostics)
    keys = _named_keys(
        graph, profile, names, _Modules(instructions, own.keys() - others, others), diagnostics
    )
    if not is_own:
        keys, strange = join_by_structure(graph, profile, keys, (stated, others), diagnostics)
        others |= strange
        _tell_unnamed(graph, profile, keys, others, diagnostics)
    # What is left to be matched in order. The last: names no operation.
    known = np.array([*(bool(key.nodes) or key.module in others for key in keys), True], np.bool_)
    ordered, more = _in_order(graph, profile, np.flatnonzero(~known[event_key]), len(keys))
    keys.extend(more)
    event_key = np.where(ordered >= 0, ordered, event_key)
    shared = np.isin(graph.op_class, [int(op_class) for op_class in _SHARED])
    talks = np.isin(graph.op_class, (int(OpClass.COLLECTIVE), int(OpClass.P2P)))
    _tell_runs(graph, profile, keys, event_key, diagnostics)
    key_group, node_group = group_keys(keys, shared, talks)
    event_group = np.append(key_group, -1)[event_key]
    _tell_absent(profile, others | own.keys(), event_group < 0, diagnostics)
    return Matching(
        keys=tuple(keys),
        event_key=event_key,
        event_group=event_group,
        node_group=node_group,
        num_groups=int(key_group.max(initial=-1)) + 1,
    )


def _tell_unnamed(
    graph: OpGraph, profile: Profile, keys: Sequence[EventKey], others: set[str], diagnostics: Diagnostics
) -> None:
    """Say so where a program without names leaves instructions of a module unmatched that is here."""
    if bool((graph.framework_row > 0).any()):
        return
    here = {name.removeprefix(_ATTACHED) for name in profile.attachments} - others
    diagnostics.warning(
        NO_NAMES,
        graph.name,
        "the program has no names of its operations, by which instructions of the profile find theirs: "
        f"a plain as_text() leaves them out; {WITH_NAMES}",
        count=sum(not key.nodes and key.module in here for key in keys),
    )


def _tell_absent(profile: Profile, known: set[str], unmatched: BoolArray, diagnostics: Diagnostics) -> None:
    """Say so where events name instructions of modules that nobody has: names alone tell nothing of them."""
    rows = np.unique(profile.module_row[unmatched & (profile.op_row > 0)]).tolist()
    texts = {row: profile.strings[row] for row in rows}
    held = {name.removeprefix(_ATTACHED) for name in profile.attachments} | known
    absent = [row for row, text in texts.items() if text and text not in held]
    named = ", ".join(texts[row][:80] for row in absent[:_MOST_NAMED])
    diagnostics.warning(
        NO_MODULE,
        profile.name,
        f"events name instructions of compiled programs ({named}) that this file does not hold: nothing "
        "tells which operations they carry out",
        count=int((unmatched & np.isin(profile.module_row, absent)).sum()),
    )


def _tell_runs(
    graph: OpGraph, profile: Profile, keys: Sequence[EventKey], event_key: IntArray, diagnostics: Diagnostics
) -> None:
    """Say so where events that name no run are too many for one: they would count as one long run."""
    rows = np.flatnonzero((profile.run < 0) & (event_key >= 0))
    if not len(rows):
        return
    places = profile.rank[rows].astype(np.int64) << 32 | event_key[rows]
    distinct, counts = np.unique(places, return_counts=True)
    runs = graph.multiplicity
    found: list[tuple[int, int]] = np.stack((distinct & 0xFFFFFFFF, counts), axis=1).tolist()
    for number, count in found:
        key = keys[number]
        if key.rule == _INSTRUCTION and count > runs[list(key.nodes)].sum():
            diagnostics.warning(
                "match.runs-unknown",
                profile.name,
                f"{key.op} has {count:,} events and the program runs it less often, but no event says in "
                "which run it is: all count as one run",
            )


class _Modules(NamedTuple):
    """Nodes by the name of the instruction, the modules that are the program, and those that only look so."""

    instructions: Mapping[str, list[int]]
    own: set[str]
    others: set[str]


def _named_keys(
    graph: OpGraph,
    profile: Profile,
    names: Sequence[tuple[str, str]],
    told: _Modules,
    diagnostics: Diagnostics,
) -> list[EventKey]:
    """Rules 1 and 2: what the names of events say."""
    modules = dict(_modules(profile, diagnostics))
    named = _Named(_rows_by(graph, "framework"), _rows_by(graph, "source"), _manual_names(graph))
    keys: list[EventKey] = []
    for module, op in names:
        talks = _COMMUNICATES.match(op) is not None
        nodes: Sequence[int] = told.instructions.get(op, ()) if module in told.own else ()
        rule, inferred = _INSTRUCTION, False
        is_known = bool(nodes) or module in told.others
        origin = None if is_known else _origin(modules, module, op)
        if origin is not None:
            nodes, rule = _carried_out(graph, origin, named)
            inferred = origin.inferred
        keys.append(
            EventKey(
                module=module,
                op=op,
                nodes=tuple(nodes),
                rule=rule if nodes else -1,
                inferred=inferred,
                communicates=talks,
            )
        )
    return keys


def _event_keys(profile: Profile) -> tuple[list[tuple[str, str]], IntArray]:
    """Distinct (module, operation) of the events, and each event's (-1: it names no operation)."""
    module, op = profile.module_row.astype(np.int64), profile.op_row.astype(np.int64)
    pairs, place = np.unique(module << 32 | op, return_inverse=True)
    strings = profile.strings
    texts = [(strings[int(pair) >> 32], strings[int(pair) & 0xFFFFFFFF]) for pair in pairs.tolist()]
    named = np.array([bool(text[1]) for text in texts], np.bool_)
    return texts, np.where(named[place], place, -1).astype(np.int64) if texts else place.astype(np.int64)


def _own_modules(
    names: Sequence[tuple[str, str]], instructions: Mapping[str, list[int]]
) -> dict[str, list[str]]:
    """The operations of each module that are the nodes of the program, by name."""
    ran: dict[str, list[str]] = {}
    for module, op in names:
        if op:
            ran.setdefault(module, []).append(op)
    return {
        module: ops for module, ops in ran.items() if 2 * sum(op in instructions for op in ops) >= len(ops)
    }


def _names(graph: OpGraph) -> Mapping[str, list[int]]:
    """Nodes by name: instructions of a compiled program. A loop written out has several alike of one name;
    a name that different nodes have (``aten::mm``) is none of an instruction.
    """
    found: dict[str, list[int]] = {}
    by_row: dict[int, list[int]] = {}
    for node, row in enumerate(graph.name_row.tolist()):
        if row:
            by_row.setdefault(row, []).append(node)
    for row, nodes in by_row.items():
        if len(nodes) == 1 or len({_signature(graph, node) for node in nodes}) == 1:
            found[graph.strings[row]] = nodes
    return found


def _signature(graph: OpGraph, node: int) -> tuple[int, bytes, bytes]:
    """What a node does: operation, operand types, result types."""
    types = graph.operands.row(node).tobytes(), graph.results.row(node).tobytes()
    return (int(graph.op_row[node]), *types)


def _modules(profile: Profile, diagnostics: Diagnostics) -> Iterator[tuple[str, Mapping[str, Provenance]]]:
    """What the instructions of each attached module carry out."""
    for name, data in profile.attachments.items():
        if not name.startswith(_ATTACHED):
            continue
        try:
            yield name.removeprefix(_ATTACHED), module_provenance(data, name)
        except HespasError as error:
            diagnostics.warning("match.unreadable-module", profile.name, f"module {name}: {error.message}")


def _origin(modules: Mapping[str, Mapping[str, Provenance]], module: str, op: str) -> Provenance | None:
    """By module and instruction; by instruction alone where the event does not say which module and all
    modules that have it agree.
    """
    if module:
        return modules.get(module, {}).get(op)
    found = {each[op] for each in modules.values() if op in each}
    return found.pop() if len(found) == 1 else None


def _rows_by(graph: OpGraph, column: str) -> Mapping[str, list[int]]:
    """Nodes by the framework's name, or by source line without the column."""
    rows = graph.framework_row if column == "framework" else graph.source_row
    strings = graph.strings
    found: dict[str, list[int]] = {}
    for node, row in enumerate(rows.tolist()):
        if row:
            text = strings[row] if column == "framework" else _line(strings[row])
            found.setdefault(text, []).append(node)
    return found


def _line(source: str) -> str:
    """``file:line`` of ``file:line:column``."""
    file, _, last = source.rpartition(":")
    before = file.rpartition(":")[2]
    return file if last.isdigit() and before.isdigit() else source


class _Named(NamedTuple):
    """Nodes by the framework's name, by source line, and, of regions of manual sharding, by names that lack
    what stands before the region.
    """

    frameworks: Mapping[str, list[int]]
    lines: Mapping[str, list[int]]
    manual: Mapping[str, list[int]]


def _manual_names(graph: OpGraph) -> Mapping[str, list[int]]:
    """Nodes within regions of manual sharding by the framework's name."""
    found: dict[str, list[int]] = {}
    around = regions_around(graph, RegionKind.MANUAL)
    for node, row in enumerate(graph.framework_row.tolist()):
        if row and around[node]:
            found.setdefault(graph.strings[row], []).append(node)
    return found


def _manual(name: str, manual: Mapping[str, list[int]]) -> Sequence[int]:
    """The nodes that bear the longest end of a name which any bears."""
    rest = name
    while manual and "/" in rest:
        rest = rest.partition("/")[2]
        if rest in manual:
            return manual[rest]
    return ()


def _carried_out(graph: OpGraph, origin: Provenance, named: _Named) -> tuple[Sequence[int], int]:
    """Nodes that an instruction carries out, and the rule; the line is asked where no name is known."""
    by_name: list[int] = []
    for part in origin.origins:
        nodes = named.frameworks.get(part.name) or _manual(part.name, named.manual)
        by_name.extend(nodes)
        if part.multiplies:
            by_name.extend(_matmuls_behind(graph, nodes))
    if by_name:
        return list(dict.fromkeys(by_name)), _OP_NAME
    by_line = [node for part in origin.origins for node in named.lines.get(_line(part.source), ())]
    return list(dict.fromkeys(by_line)), _SOURCE_LINE


def _matmuls_behind(graph: OpGraph, nodes: Sequence[int]) -> list[int]:
    """The matmuls that nodes only move the results of: XLA turns the transpose of a matmul into a matmul
    that bears the name of the transpose. None where a matmul is among ``nodes``.
    """
    found: list[int] = []
    pending, seen = list(nodes), set(nodes)
    while pending:
        node = pending.pop()
        if graph.op_class[node] in _MATMULS:
            found.append(node)
        elif graph.op_class[node] in _MOVERS:
            fresh = [dep for dep in graph.data_deps.row(node).tolist() if dep not in seen]
            seen.update(fresh)
            pending.extend(fresh)
    return [] if any(node in nodes for node in found) else found


# Matching by what an operation is and the place it has in a run, for events that name no instruction.

_NAMESPACES = frozenset({"aten", "prims"})
_SIGNATURE, _ORDER = RULES.index("signature"), RULES.index("order")


def _in_order(
    graph: OpGraph, profile: Profile, waiting: IntArray, first_key: int
) -> tuple[IntArray, list[EventKey]]:
    """The k-th event of an operation in each rank and run is the k-th node of it, where all ranks and runs
    have as many as the program has nodes: first by operation and operand shapes, then by operation alone.
    In a loop of m trips the nodes of its body come round m times.

    ``waiting`` lists the events nobody matches yet. Gives the key of each event, by numbers from
    ``first_key`` on (-1: unmatched), and the keys. O(nodes + events log events).
    """
    event_key = np.full(len(profile), -1, np.int64)
    keys: list[EventKey] = []
    taken = np.zeros(len(graph), np.bool_)
    for rule in (_SIGNATURE, _ORDER):
        nodes = _nodes_by(graph, taken, with_shapes=rule == _SIGNATURE)
        for signature, events in _events_by(profile, waiting, with_shapes=rule == _SIGNATURE).items():
            candidates = nodes.get(signature, ())
            places = _places(graph, profile, events, candidates) if candidates else None
            if places is None:
                continue
            event_key[events] = first_key + len(keys) + places
            keys.extend(EventKey(module="", op=signature[0], nodes=(node,), rule=rule) for node in candidates)
            taken[list(candidates)] = True
        waiting = waiting[event_key[waiting] < 0]
    return event_key, keys


def _base(name: str) -> str:
    """``mm`` of ``aten::mm``, ``aten::mm.out``, ``aten.mm.default`` and ``stablehlo.mm``; the number of an
    instruction (``dot.3``) belongs to its name.
    """
    space, colons, rest = name.rpartition("::")
    if colons:
        return rest.partition(".")[0] or space
    first, _, rest = name.partition(".")
    if first in _NAMESPACES and rest:
        return rest.partition(".")[0]
    last = name.rpartition(".")[2]
    return name if last.isdigit() else last


def _nodes_by(
    graph: OpGraph, taken: np.ndarray[tuple[int], np.dtype[np.bool_]], *, with_shapes: bool
) -> dict[tuple[str, str], Sequence[int]]:
    strings, types = graph.strings, graph.types
    names = {row: _base(strings[row]) for row in np.unique(graph.op_row).tolist()}
    operands = graph.operands.to_lists() if with_shapes else []
    found: dict[tuple[str, str], list[int]] = {}
    runs = graph.multiplicity != 0
    for node, row in enumerate(graph.op_row.tolist()):
        if taken[node] or not runs[node]:
            continue
        shapes = _shape_text([types.shape(kind) for kind in operands[node]]) if with_shapes else ""
        if shapes or not with_shapes:
            found.setdefault((names[row], shapes), []).append(node)
    return dict(found)


def _events_by(profile: Profile, waiting: IntArray, *, with_shapes: bool) -> dict[tuple[str, str], IntArray]:
    """The waiting events of each signature, by rank, run and start."""
    rows = profile.op_row[waiting].astype(np.int64)
    shapes = profile.shapes_row[waiting].astype(np.int64) if with_shapes else np.zeros_like(rows)
    keys, place = np.unique(rows << 32 | shapes, return_inverse=True)
    numbers: dict[tuple[str, str], int] = {}  # several spellings may be the same operation
    same = np.full(len(keys), -1, np.int64)
    for row, key in enumerate(keys.tolist()):
        name, shape = profile.strings[key >> 32], profile.strings[key & 0xFFFFFFFF]
        if name and (shape or not with_shapes):
            same[row] = numbers.setdefault((_base(name), shape.replace(" ", "")), len(numbers))
    place = same[place]
    order = np.lexsort((profile.start_ns[waiting], profile.run[waiting], profile.rank[waiting], place))
    bounds = np.searchsorted(place[order], np.arange(len(numbers) + 1))
    return {
        signature: waiting[order[bounds[number] : bounds[number + 1]]]
        for signature, number in numbers.items()
    }


def _places(graph: OpGraph, profile: Profile, events: IntArray, nodes: Sequence[int]) -> IntArray | None:
    """The place among ``nodes`` of each event within its rank and run; None where one has another number of
    events than the nodes have, or the nodes stand in different loops.
    """
    rows = list(nodes)
    trips = graph.multiplicity[rows]
    if len(set(graph.region[rows].tolist())) > 1 and bool((trips != 1).any()):
        return None
    wanted = float(trips.sum())
    part = profile.rank[events].astype(np.int64) << 32 | profile.run[events].astype(np.int64) & 0xFFFFFFFF
    _, first, counts = np.unique(part, return_index=True, return_counts=True)
    if bool((counts != wanted).any()):
        return None
    starts: IntArray = np.repeat(np.sort(first), counts).astype(np.int64)
    return (np.arange(len(events), dtype=np.int64) - starts) % len(nodes)


def _shape_text(shapes: Sequence[Sequence[int]]) -> str:
    """``[[4,8],[8,2]]``, as profilers write it."""
    return "[" + ",".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes) + "]" if shapes else ""


_LEAST_ALIKE = 0.9
"""A program whose instructions make other shapes than this share of those that ran is another program."""

_MOST_APART = 2.0
"""Compilers change the FLOPs of matmuls, but not by such a factor."""


def compiled_module(profile: Profile, module: str) -> Workload | None:
    """A module that the profile brings along; None where there is none, or it cannot be read."""
    data = profile.attachments.get(_ATTACHED + module)
    if data is None:
        return None
    try:
        return workload_of(parse_module(source_of(data, module)), ReadOptions(), Diagnostics())
    except (HespasError, ValueError):  # ValueError: of an attribute; whoever matches by it reports it
        return None


def other_modules(
    graph: OpGraph,
    profile: Profile,
    own: Mapping[str, Sequence[str]],
    instructions: Mapping[str, Sequence[int]],
    diagnostics: Diagnostics,
) -> set[str]:
    """Those of the modules ``own``, whose instructions are called as the program's, that are another program:
    their instructions make results of other shapes. ``own`` are the names of the instructions that ran, by
    module; ``instructions`` nodes by name. A warning tells each, and each module without HLO that lacks many
    names.
    """
    found: set[str] = set()
    for module, ran in own.items():
        shared = [op for op in ran if op in instructions]
        compiled = compiled_module(profile, module)
        if compiled is None:
            if len(shared) < _LEAST_ALIKE * len(ran):
                diagnostics.warning(
                    OTHER_PROGRAM,
                    profile.name,
                    f"module {module or '(unnamed)'}: the program has {len(shared):,} of the {len(ran):,} "
                    "instructions that ran: is it the program that ran?",
                )
            continue
        real = compiled.classes[0]
        nodes = {real.node_name(node): node for node in range(len(real))}
        alike = sum(_alike(graph, instructions[op][0], real, nodes.get(op, -1)) for op in shared)
        if alike < _LEAST_ALIKE * len(shared):
            found.add(module)
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"module {module}: another program ran: of {len(shared):,} instructions of equal name "
                f"{alike:,} make results of equal shape; nothing of it is matched",
            )
    return found


def _alike(graph: OpGraph, node: int, real: OpGraph, other: int) -> bool:
    """Whether both make the same; where one does not say what, nothing speaks against it."""
    if other < 0:
        return False
    one, two = _made(graph, node), _made(real, other)
    return one == two or not one or not two


def _made(graph: OpGraph, node: int) -> list[tuple[str, tuple[int, ...]]]:
    types = graph.types
    rows: list[int] = graph.results.row(node).tolist()
    elements = [types.dtype_of(row) for row in rows]
    return [
        ("" if element is None else element.name, tuple(types.shape(row)))
        for element, row in zip(elements, rows, strict=True)
    ]


def check_program(workload: Workload, profile: Profile, diagnostics: Diagnostics) -> None:
    """Warn where the modules of ``profile``, all of them matched with the program, ran on another number of
    devices than the program is for, or their matmuls do another number of FLOPs. O(modules read).
    """
    for row in np.unique(profile.module_row).tolist():
        module = profile.strings[row]
        compiled = compiled_module(profile, module)
        if compiled is None:
            continue
        # A module without collectives does not say for how many devices it is; those that ran it do.
        devices = max(compiled.num_ranks, len(np.unique(profile.rank[profile.module_row == row])))
        if devices != workload.num_ranks:
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"module {module} is for {devices:,} ranks, and the program for {workload.num_ranks:,}: "
                "is it the program that ran?",
            )
            continue
        graph, *others = workload.classes
        if others:
            continue
        real = compiled.classes[0]
        asked, did = _matmul_flops(graph), _matmul_flops(real) * devices
        # A program before it is partitioned has the FLOPs of all devices, or, where it is partitioned by
        # hand, of one.
        if did and asked and not asked / _MOST_APART <= did <= asked * devices * _MOST_APART:
            diagnostics.warning(
                OTHER_PROGRAM,
                profile.name,
                f"the matmuls of module {module} do {did:.3g} FLOPs, those of the program {asked:.3g}: "
                "is it the program that ran?",
            )


def _matmul_flops(graph: OpGraph) -> float:
    """FLOPs of all matmuls in a step; 0 where some are unknown, or within library calls."""
    if "custom-call" in (graph.strings[row] for row in np.unique(graph.op_row).tolist()):
        return 0.0
    matmuls = graph.contractions
    total = float((matmuls.flops * graph.multiplicity[matmuls.node]).sum())
    return total if np.isfinite(total) else 0.0
