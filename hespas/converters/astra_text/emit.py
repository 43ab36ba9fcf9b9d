"""Nodes of a text workload: phases of layers, their collectives and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hespas.converters.astra_text.grammar import Layer, Phase
from hespas.converters.astra_text.groups import Groups
from hespas.converters.astra_text.policies import Role
from hespas.graph import GraphBuilder, NodeKind, OpClass

__all__ = ["CYCLE_NS", "Emitter"]

CYCLE_NS = 1.0
"""``CLOCK_PERIOD`` in ``Common.hh`` of ASTRA-sim 1.0: a cycle is a nanosecond."""

_OPERATIONS = {"fwd": "forward", "again": "forward", "ig": "input_grad", "wg": "weight_grad"}


@dataclass(slots=True, eq=False)
class Emitter:
    """Adds nodes to ``builder``; ``source`` is what their locations start with (empty: no locations).

    Counts collectives: those that the policy does not run, those of one rank or no bytes, which are left
    out, and those whose groups nobody knows; and the phases computed that take time.
    """

    builder: GraphBuilder
    groups: Groups
    source: str
    not_run: int = 0
    left_out: int = 0
    unknown: int = 0
    computed: int = 0

    def compute(
        self, layer: Layer, name: str, phase: Phase, needs: Sequence[int], follows: Sequence[int] = ()
    ) -> int:
        """The computation of a phase, which needs some nodes and comes after others."""
        node = self._node(layer, name, _OPERATIONS[name], needs, follows)
        self.builder.set(node, duration_ns=phase.cycles * CYCLE_NS)
        self.computed += phase.cycles > 0 and name != "again"
        return node

    def collective(
        self, layer: Layer, name: str, phase: Phase, role: Role, after: Sequence[int]
    ) -> list[int]:
        """The collective of a phase and its update: what waits for it waits for the node returned, which is
        ``after`` where nothing is run.
        """
        if phase.kind is None:
            return list(after)
        if role is Role.NOBODY:
            self.not_run += 1
            return list(after)
        if not phase.size_bytes or self.groups.is_alone(role):
            self.left_out += 1
            return list(after)
        operation = phase.kind.name.lower()
        node = self._node(layer, f"{name}.{operation}", operation, after, kind=NodeKind.COLLECTIVE)
        groups = self.groups.sets.get(role)
        self.unknown += groups is None and role is not Role.WORLD
        self.builder.add_collective(
            node,
            phase.kind,
            group_set=-1 if groups is None else self.builder.group_set(groups),
            comm_bytes=phase.size_bytes,
        )
        if not layer.update_cycles:
            return [node]
        update = self._node(layer, f"{name}.update", "update", (node,))
        self.builder.set(update, duration_ns=layer.update_cycles * CYCLE_NS)
        return [update]

    def _node(
        self,
        layer: Layer,
        name: str,
        operation: str,
        needs: Sequence[int],
        follows: Sequence[int] = (),
        *,
        kind: NodeKind = NodeKind.COMPUTE,
    ) -> int:
        strings = self.builder.strings
        node = self.builder.add_node(
            name_row=strings.add(f"{layer.name}.{name}"),
            op_row=strings.add(operation),
            op_class=OpClass.COLLECTIVE if kind is NodeKind.COLLECTIVE else OpClass.UNKNOWN,
            kind=kind,
            data_deps=tuple(dict.fromkeys(needs)),
            control_deps=tuple(node for node in dict.fromkeys(follows) if node not in needs),
        )
        self.builder.set(node, framework_row=strings.add(layer.name))
        if self.source:
            self.builder.set(node, source_row=strings.add(f"{self.source}:{layer.line}"))
        return node
