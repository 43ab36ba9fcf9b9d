"""A text workload of ASTRA-sim 1.0 to one step of a job whose ranks all run the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hespas.converters.astra_text.grammar import (
    ROLES,
    TRANSFORMERS,
    Layer,
    LayerRoles,
    ParallelGroups,
    ParallelismPolicy,
    Phase,
    Role,
    TextWorkload,
    parse,
)
from hespas.converters.format import ReadOptions
from hespas.files.limits import limits
from hespas.files.streams import read_bytes
from hespas.graph import CollectiveKind, Diagnostics, GraphBuilder, NodeKind, OpClass, Workload
from hespas.graph.errors import FormatError

__all__ = ["read_astra_text"]


# --- Nodes of a text workload: phases of layers, their collectives and updates.

_CYCLE_NS = 1.0
"""``CLOCK_PERIOD`` in ``Common.hh`` of ASTRA-sim 1.0: a cycle is a nanosecond."""

_OPERATIONS = {"fwd": "forward", "again": "forward", "ig": "input_grad", "wg": "weight_grad"}


@dataclass(slots=True, eq=False)
class _LayerEmitter:
    """Adds nodes to ``builder``; ``source`` is what their locations start with (empty: no locations).

    Counts collectives: those that the policy does not run, those of one rank or no bytes, which are left
    out, and those whose groups nobody knows; and the phases computed that take time.
    """

    builder: GraphBuilder
    groups: ParallelGroups
    source: str
    not_run: int = 0
    skipped: int = 0
    unknown: int = 0
    computed: int = 0

    def compute(
        self, layer: Layer, name: str, phase: Phase, needs: Sequence[int], follows: Sequence[int] = ()
    ) -> int:
        """The computation of a phase, which needs some nodes and comes after others."""
        node = self._node(layer, name, _OPERATIONS[name], needs, follows)
        self.builder.set(node, duration_ns=phase.cycles * _CYCLE_NS)
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
            self.skipped += 1
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
        self.builder.set(update, duration_ns=layer.update_cycles * _CYCLE_NS)
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


def read_astra_text(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file; ``options.num_devices`` states the number of ranks, which the format does not.

    Times are in ns, a cycle being one. Groups that depend on the network are left unknown (all ranks) and
    reported. Raises :class:`FormatError`, :class:`UnsupportedError` and :class:`UsageError`.
    """
    data = read_bytes(path, min(options.max_bytes, limits().text_workload_bytes))
    try:
        text = parse(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise FormatError(
            "the file is no UTF-8 text",
            path=str(path),
            position=f"byte {error.start}",
            hint="is this a workload of ASTRA-sim 1.0?",
        ) from error
    groups = ParallelGroups.of(text, options.num_devices, str(path))
    name = path.name.removesuffix(".gz").removesuffix(".txt")
    emitter = _LayerEmitter(GraphBuilder(name), groups, path.name if options.locations else "")
    _LOOPS[text.policy](text, emitter)
    _report(text, emitter, str(path), diagnostics)
    metadata = {"format": "astra-text", "parallelism": text.policy.value}
    if text.model_ranks > 0:
        metadata["model_parallel_npu_group"] = str(text.model_ranks)
    return Workload.spmd(emitter.builder.build(), groups.num_ranks, metadata)


def _report(text: TextWorkload, emitter: _LayerEmitter, path: str, diagnostics: Diagnostics) -> None:
    """Say what was assumed and what is not in the graph."""

    def warn(code: str, message: str, count: int) -> None:
        diagnostics.warning(f"astra-text.{code}", path, message, path=path, count=count)

    def note(code: str, message: str, count: int) -> None:
        diagnostics.info(f"astra-text.{code}", path, message, path=path, count=count)

    ranks = f"taken as {emitter.groups.num_ranks:,}: state it with `num_devices`"
    warn("ranks", f"the file does not say how many ranks run it; {ranks}", not emitter.groups.is_stated)
    network = "the file does not describe the network whose dimensions collectives run over"
    warn("network-groups", f"{network}; they are taken as over all ranks", emitter.unknown)
    warn("trailing-text", "words stand behind the last layer and were not read", text.rest)
    note("cycles", f"layers state times in cycles, taken as {_CYCLE_NS:g} ns each", len(text.layers))
    note("not-run", "collectives are stated that the policy never runs", emitter.not_run)
    phases = (
        phase for layer in text.layers for phase in (layer.forward, layer.input_grad, layer.weight_grad)
    )
    idle = sum(phase.cycles > 0 for phase in phases) - emitter.computed
    note("not-computed", "times are stated of phases that the policy never computes", idle)
    note("no-transfer", "collectives of one rank or of no bytes are left out", emitter.skipped)
    reserved = sum(layer.reserved != -1 for layer in text.layers)
    note("reserved", "layers use the reserved column, which nothing reads", reserved)
    others = len(text.layers) - 1 if text.policy is ParallelismPolicy.MICRO else 0
    note("micro", "layers behind the first are never run by a MICRO workload", others)


# One training step of a text workload as a graph: the loops of ``Workload.cc`` of ASTRA-sim 1.0, unrolled.
#
# A rank computes one phase at a time. What a phase needs is a data dependency, the order of phases a
# control dependency. A collective that blocks is waited for by the next phase; any other overlaps with what
# follows. After each collective comes the update that the layer states. Weight gradients are waited for by
# the next step only, so nothing here depends on them.
#
# Chakra's converter of these files (``converter/text_converter.py``) writes the same order with data
# dependencies only. It differs from the simulator that defined the format, and from this module, in that it
# takes cycles for microseconds, writes collectives ``NONE`` as all-reduces of 0 bytes, leaves updates and
# groups out, joins the embedding of DLRM one layer early, runs the collectives of all layers in ``MICRO``,
# and knows no transformer, inference or customised workloads.


def _micro(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """The weight-gradient collective of the first layer, and nothing else."""
    layer = text.layers[0]
    emitter.collective(layer, "fwd", layer.forward, Role.NOBODY, ())
    emitter.collective(layer, "ig", layer.input_grad, Role.NOBODY, ())
    emitter.collective(layer, "wg", layer.weight_grad, Role.WORLD, ())


def _inference(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """The forward pass."""
    _forward(text, emitter, range(len(text.layers)))
    for layer in text.layers:
        emitter.collective(layer, "ig", layer.input_grad, Role.NOBODY, ())
        emitter.collective(layer, "wg", layer.weight_grad, Role.NOBODY, ())


def _data_parallel(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """Backward, a layer's weight gradient comes first, and its collective overlaps."""
    outputs = _forward(text, emitter, range(len(text.layers)))
    _weights_first(text, emitter, outputs[-1])


def _recommendation(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """As data parallel. The all-to-all of the embedding (layer 0) overlaps with the bottom layers, and the
    one back with their backward pass.
    """
    outputs: list[int] = []
    embedding: list[int] = []
    joint = text.last_bottom_layer + 1
    for number, layer in enumerate(text.layers):
        needs = outputs[-1:] + (embedding if number == joint > 1 else [])
        node = emitter.compute(layer, "fwd", layer.forward, needs)
        outputs.append(node)
        is_exchange = number == 0 and layer.forward.kind is CollectiveKind.ALL_TO_ALL
        role = Role.WORLD if is_exchange else Role.NOBODY
        done = emitter.collective(layer, "fwd", layer.forward, role, (node,))
        embedding = done if is_exchange and done != [node] else embedding

    def exchange_back(number: int, gradient: int) -> None:
        if number == joint:
            first = text.layers[0]
            emitter.collective(first, "ig", first.input_grad, Role.WORLD, (gradient,))

    joins = embedding if len(text.layers) == joint > 1 else []
    _weights_first(text, emitter, outputs[-1:] + joins, exchange_back)


def _weights_first(
    text: TextWorkload,
    emitter: _LayerEmitter,
    gradient: Sequence[int],
    behind: Callable[[int, int], None] | None = None,
) -> None:
    """The backward pass where only weight gradients are exchanged. The first layer has no input gradient."""
    for number in reversed(range(len(text.layers))):
        layer = text.layers[number]
        weight = emitter.compute(layer, "wg", layer.weight_grad, gradient)
        emitter.collective(layer, "wg", layer.weight_grad, Role.WORLD, (weight,))
        if not number:
            return
        node = emitter.compute(layer, "ig", layer.input_grad, gradient, (weight,))
        emitter.collective(layer, "ig", layer.input_grad, Role.NOBODY, (node,))
        gradient = (node,)
        if behind:
            behind(number, node)


def _model_parallel(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """Backward, a layer's input gradient comes first; its collective overlaps with the weight gradient."""
    # The backward pass where input gradients are exchanged; that of the first layer by transformers only.
    # Release 1.0 of 2023 is followed. In those up to 2022 transformers wait for the input gradient before
    # they compute the weight gradient.
    outputs = _forward(text, emitter, range(len(text.layers)))
    gradient, follows = outputs[-1], list[int]()
    for number in reversed(range(len(text.layers))):
        layer, roles = text.layers[number], _roles(text, number)
        # Run the layers from the last checkpoint up to this one forward again, where it asks for that, but
        # not before what it ``follows``.
        if number not in text.initiates:
            again = []
        else:
            start = next(layer for layer in range(number - 1, -1, -1) if layer in text.checkpoints)
            needs = outputs[start - 1] if start else []
            again = _forward(
                text, emitter, range(start, number), name="again", needs=needs, follows=(*gradient, *follows)
            )[-1]
        node = emitter.compute(layer, "ig", layer.input_grad, (*gradient, *again), () if again else follows)
        role = roles.input_grad if number or text.policy in TRANSFORMERS else Role.NOBODY
        done = emitter.collective(layer, "ig", layer.input_grad, role, (node,))
        weight = emitter.compute(layer, "wg", layer.weight_grad, gradient, (node,))
        emitter.collective(layer, "wg", layer.weight_grad, roles.weight_grad, (weight,))
        gradient, follows = done, [weight]


def _forward(
    text: TextWorkload,
    emitter: _LayerEmitter,
    numbers: range,
    *,
    name: str = "fwd",
    needs: Sequence[int] = (),
    follows: Sequence[int] = (),
) -> list[list[int]]:
    """Layers one behind the other, each waiting for the collective of the one before; returns what to wait
    for behind each.
    """
    outputs: list[list[int]] = []
    for number in numbers:
        layer = text.layers[number]
        node = emitter.compute(layer, name, layer.forward, needs, follows)
        outputs.append(emitter.collective(layer, name, layer.forward, _roles(text, number).forward, (node,)))
        needs, follows = outputs[-1], ()
    return outputs


def _roles(text: TextWorkload, number: int) -> LayerRoles:
    return ROLES[text.layers[number].policy or text.policy]


_LOOPS: MappingProxyType[ParallelismPolicy, Callable[[TextWorkload, _LayerEmitter], None]] = MappingProxyType(
    {
        ParallelismPolicy.MICRO: _micro,
        ParallelismPolicy.DISTRIBUTED_INFERENCE: _inference,
        ParallelismPolicy.DATA: _data_parallel,
        ParallelismPolicy.HYBRID_DLRM: _recommendation,
        ParallelismPolicy.HYBRID_DLRM_ENHANCED: _recommendation,
        ParallelismPolicy.MODEL: _model_parallel,
        ParallelismPolicy.HYBRID_DATA_MODEL: _model_parallel,
        ParallelismPolicy.HYBRID_MODEL_DATA: _model_parallel,
        ParallelismPolicy.HYBRID_CUSTOMIZED: _model_parallel,
        ParallelismPolicy.HYBRID_TRANSFORMER: _model_parallel,
        ParallelismPolicy.HYBRID_TRANSFORMER_FWD_IN_BCKWD: _model_parallel,
    }
)
