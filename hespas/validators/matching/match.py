"""Matches the nodes of a program to the events of a profile.

Rules, strongest first; each is asked only about what the ones before left:

1. the event names an instruction of the program itself (an HLO program and XLA's ``hlo_op``);
2. the event names an instruction of a compiled module that the profile brings along: its metadata, and those
   of all it fuses, say which operations of the source program it carries out (by name, then by source line);
3. the event's operation and shapes, or its operation alone, are those of as many nodes, in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hespas.converters.hlo.provenance import Provenance, module_provenance
from hespas.graph import Diagnostics, OpClass, OpGraph, Profile
from hespas.graph.columns import IntArray
from hespas.graph.errors import HespasError
from hespas.validators.matching.groups import EventKey, Matching, group_keys
from hespas.validators.matching.ordering import in_order

__all__ = ["match_program"]

_INSTRUCTION, _OP_NAME, _SOURCE_LINE = range(3)
_ATTACHED = "hlo/"
_COMMUNICATES = re.compile(
    r"(wrapped_)?(ragged-)?(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast|send|recv)(-start|-done)?\b"
)
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


def match_program(graph: OpGraph, profile: Profile, diagnostics: Diagnostics) -> Matching:
    """Match every event of ``profile`` that can be to nodes of ``graph``; ``diagnostics`` tell what cannot.

    Raises nothing: a module that cannot be read counts as absent. O(nodes + events + links).
    """
    names, event_key = _event_keys(profile)
    keys = _named_keys(graph, profile, names, diagnostics)
    known = np.array([*(bool(key.nodes) for key in keys), True], np.bool_)  # the last: names no operation
    ordered = in_order(graph, profile, np.flatnonzero(~known[event_key]), len(keys))
    keys.extend(ordered.keys)
    event_key = np.where(ordered.event_key >= 0, ordered.event_key, event_key)
    shared = np.isin(graph.op_class, [int(op_class) for op_class in _SHARED])
    talks = np.isin(graph.op_class, (int(OpClass.COLLECTIVE), int(OpClass.P2P)))
    key_group, node_group = group_keys(keys, shared, talks)
    return Matching(
        keys=tuple(keys),
        event_key=event_key,
        event_group=np.append(key_group, -1)[event_key],
        node_group=node_group,
        num_groups=int(key_group.max(initial=-1)) + 1,
    )


def _named_keys(
    graph: OpGraph, profile: Profile, names: Sequence[tuple[str, str]], diagnostics: Diagnostics
) -> list[EventKey]:
    """Rules 1 and 2: what the names of events say."""
    instructions = _names(graph)
    modules = dict(_modules(profile, diagnostics))
    frameworks, lines = _rows_by(graph, "framework"), _rows_by(graph, "source")
    keys: list[EventKey] = []
    for module, op in names:
        talks = _COMMUNICATES.match(op) is not None
        nodes: Sequence[int] = instructions.get(op, ())
        rule, inferred = _INSTRUCTION, False
        origin = None if nodes else _origin(modules, module, op)
        if origin is not None:
            nodes, rule = _carried_out(origin, frameworks, lines)
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


def _names(graph: OpGraph) -> Mapping[str, list[int]]:
    """Nodes by name: instructions of a compiled program; a loop written out has several of one name."""
    found: dict[str, list[int]] = {}
    strings = graph.strings
    for node, row in enumerate(graph.name_row.tolist()):
        if row:
            found.setdefault(strings[row], []).append(node)
    return found


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
    """By module and instruction; by instruction alone where the event does not say which module."""
    if module in modules:
        return modules[module].get(op)
    if module:
        return None
    return next((found[op] for found in modules.values() if op in found), None)


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


def _carried_out(
    origin: Provenance, frameworks: Mapping[str, list[int]], lines: Mapping[str, list[int]]
) -> tuple[Sequence[int], int]:
    """Nodes that an instruction carries out, and the rule; the line is asked where no name is known."""
    by_name = [node for part in origin.origins for node in frameworks.get(part.name, ())]
    if by_name:
        return list(dict.fromkeys(by_name)), _OP_NAME
    by_line = [node for part in origin.origins for node in lines.get(_line(part.source), ())]
    return list(dict.fromkeys(by_line)), _SOURCE_LINE
