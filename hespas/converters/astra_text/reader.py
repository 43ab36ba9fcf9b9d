"""Reader of a text workload of ASTRA-sim 1.0 as one training step of a single rank class.

The loops of ``Workload.cc`` of ASTRA-sim 1.0 are unrolled. A rank computes one phase at a time. Inputs of a
phase are data dependencies; the order of phases is a control dependency. The next phase waits for a blocking
collective; other collectives overlap with the following phases. The update of a layer runs after each of its
collectives. Only the next step waits for weight gradients, so no node depends on them.

Chakra's converter of these files (``converter/text_converter.py``) writes the same order with data
dependencies only. It differs from ASTRA-sim 1.0 and from this module: it reads cycles as microseconds, writes
collectives ``NONE`` as all-reduces of 0 bytes, leaves out updates and groups, joins the embedding of DLRM one
layer early, runs the collectives of all layers in ``MICRO``, and does not support transformer, inference or
customised workloads.
"""

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
from hespas.graph.progress import Progress

__all__ = ["read_astra_text"]


_CYCLE_NS = 1.0
"""``CLOCK_PERIOD`` in ``Common.hh`` of ASTRA-sim 1.0: a cycle is a nanosecond."""

_OPERATIONS = {"fwd": "forward", "again": "forward", "ig": "input_grad", "wg": "weight_grad"}


@dataclass(slots=True, eq=False)
class _LayerEmitter:
    """Builder that adds nodes for the layers of a text workload to ``builder``. ``source`` is the prefix of
    the source positions of the nodes (empty: none).

    ``not_run`` counts collectives that the policy does not run, and ``skipped`` collectives with one rank or
    zero bytes. ``unknown`` counts collectives with unknown groups, and ``computed`` phases with a duration.
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
        """Add the computation of a phase. ``needs`` are its data dependencies, ``follows`` its control
        dependencies.
        """
        node = self._node(layer, name, _OPERATIONS[name], needs, follows)
        self.builder.set(node, duration_ns=phase.cycles * _CYCLE_NS)
        self.computed += phase.cycles > 0 and name != "again"
        return node

    def collective(
        self, layer: Layer, name: str, phase: Phase, role: Role, after: Sequence[int]
    ) -> list[int]:
        """Add the collective of a phase, and after it the update of the layer's weights.

        Return the nodes for which the next phase waits: the last added node, or ``after`` if no collective
        runs.
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
            name_id=strings.add(f"{layer.name}.{name}"),
            op_id=strings.add(operation),
            op_class=OpClass.COLLECTIVE if kind is NodeKind.COLLECTIVE else OpClass.UNKNOWN,
            kind=kind,
            data_deps=tuple(dict.fromkeys(needs)),
            control_deps=tuple(node for node in dict.fromkeys(follows) if node not in needs),
        )
        self.builder.set(node, framework_id=strings.add(layer.name))
        if self.source:
            self.builder.set(node, source_id=strings.add(f"{self.source}:{layer.line}"))
        return node


def read_astra_text(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a text workload of ASTRA-sim. ``options.num_devices`` sets the number of ranks, which the format
    lacks.

    A cycle is 1 ns. Groups that depend on the network are unknown: they are reported and treated as all
    ranks. Raises :class:`FormatError`, :class:`UnsupportedError` and :class:`UsageError`.
    """
    data = read_bytes(path, min(options.max_bytes, limits().text_workload_bytes))
    try:
        text = parse(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise FormatError(
            "the file is not UTF-8 text",
            path=str(path),
            position=f"byte {error.start}",
            hint="use a text workload of ASTRA-sim 1.0",
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
    """Report assumptions, and parts of the file that are not in the graph."""

    def warn(code: str, message: str, count: int) -> None:
        diagnostics.warning(f"astra-text.{code}", path, message, path=path, count=count)

    def note(code: str, message: str, count: int) -> None:
        diagnostics.info(f"astra-text.{code}", path, message, path=path, count=count)

    ranks = f"{emitter.groups.num_ranks:,} assumed; set it with `num_devices`"
    warn("ranks", f"the file has no number of ranks; {ranks}", not emitter.groups.is_stated)
    network = "collectives run over network dimensions that the file does not describe"
    warn("network-groups", f"{network}; groups of all ranks are assumed", emitter.unknown)
    warn("trailing-text", "words after the last layer are ignored", text.rest)
    note("cycles", f"times of layers are in cycles; {_CYCLE_NS:g} ns per cycle is assumed", len(text.layers))
    note("not-run", "collectives that the policy never runs are left out", emitter.not_run)
    phases = (
        phase for layer in text.layers for phase in (layer.forward, layer.input_grad, layer.weight_grad)
    )
    idle = sum(phase.cycles > 0 for phase in phases) - emitter.computed
    note("not-computed", "times of phases that the policy never computes are left out", idle)
    note("no-transfer", "collectives of one rank or of no bytes are left out", emitter.skipped)
    reserved = sum(layer.reserved != -1 for layer in text.layers)
    note("reserved", "values in the reserved column are ignored", reserved)
    others = len(text.layers) - 1 if text.policy is ParallelismPolicy.MICRO else 0
    note("micro", "a MICRO workload runs the first layer only; the others are left out", others)


def _micro(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """Add the graph of a MICRO workload: the weight-gradient collective of the first layer only."""
    layer = text.layers[0]
    emitter.collective(layer, "fwd", layer.forward, Role.NOBODY, ())
    emitter.collective(layer, "ig", layer.input_grad, Role.NOBODY, ())
    emitter.collective(layer, "wg", layer.weight_grad, Role.WORLD, ())


def _inference(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """Add the graph of an inference workload: the forward pass."""
    _forward(text, emitter, range(len(text.layers)))
    for layer in text.layers:
        emitter.collective(layer, "ig", layer.input_grad, Role.NOBODY, ())
        emitter.collective(layer, "wg", layer.weight_grad, Role.NOBODY, ())


def _data_parallel(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """Add the forward and the backward pass of data-parallel training. In the backward pass, each layer first
    computes its weight gradient, whose collective overlaps with later work.
    """
    outputs = _forward(text, emitter, range(len(text.layers)))
    _weights_first(text, emitter, outputs[-1])


def _recommendation(text: TextWorkload, emitter: _LayerEmitter) -> None:
    """Add the forward and the backward pass of a recommendation model, as in data parallelism. The all-to-all
    of the embedding (layer 0) overlaps with the forward pass of the bottom layers. The all-to-all of the
    embedding's gradient overlaps with their backward pass.
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
    behind: Progress | None = None,
) -> None:
    """Add a backward pass in which each layer computes its weight gradient before its input gradient.

    Only weight gradients are communicated. The first layer has no input gradient. ``gradient`` are the nodes
    that compute the gradient of the model's output. ``behind(layer, node)`` is called after each input
    gradient.
    """
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
    """Add the forward and the backward pass of model parallelism. In the backward pass, each layer first
    computes its input gradient, whose collective overlaps with the computation of the weight gradient.

    Only transformers exchange the input gradient of the first layer. The order is that of release 1.0 of
    ASTRA-sim (2023). Until 2022, transformers waited for the input gradient before the weight gradient.
    """
    outputs = _forward(text, emitter, range(len(text.layers)))
    gradient, follows = outputs[-1], list[int]()
    for number in reversed(range(len(text.layers))):
        layer, roles = text.layers[number], _roles(text, number)
        # Run the layers from the last checkpoint to this one forward again, after ``follows``.
        again: list[int] = []
        if number in text.initiates:
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
    """Add the forward pass of the layers ``numbers``. Each layer waits for the collective of the previous
    layer.

    Return, for each layer, the nodes for which the next layer waits.
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
