"""Programs of all ranks drawn from a learned model of windows of a source program.

The program of a source is cut into windows of equal length in program order. A model of typed graphs
(:class:`hespas.generators.synth.synthesis.Synthesizer`) learns the windows and draws new ones, which follow
each other. Every drawn node takes the costs of a source node of its type. All ranks run the same program, so
collectives match by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Literal

import numpy as np

from hespas.generators.synth.ngram import FrontierNgram
from hespas.generators.synth.sequences import TypedDag, flatten
from hespas.generators.synth.synthesis import DraftModel, Synthesizer
from hespas.generators.synth.transformer import Transformer
from hespas.graph import ExtraTable, OpGraph, StringTable, Workload
from hespas.graph.columns import IntArray, RaggedArray, equal_rows
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import all_deps, take_nodes, topological_order

__all__ = ["LearnedPrograms", "Learner"]

Learner = Literal["n-gram", "transformer"]

_WINDOW_NODES = 120
_STRIDE = 30
"""Distance of the starts of neighbouring windows."""
_FEWEST_WINDOWS = 4
_DRAFTS = 4
_TRAINED_SEQUENCES, _FEWEST_EPOCHS = 2500, 4
"""Sequences and epochs after which most drafts of the transformer are complete graphs."""
_BITS_PER_SIZE = 1
"""Sizes of one type of node agree to a factor of two."""


class LearnedPrograms:
    """Model of the windows of a source program, which draws new programs."""

    def __init__(self, source: Workload, learner: Learner, *, novelty: float = 1.0, seed: int = 0) -> None:
        """Learn the windows of a source.

        Raises ``UnsupportedError`` for a source whose ranks run different programs, that sends messages, has
        loops, or is too short to learn from, and ``UsageError`` for invalid settings.
        """
        self._graph = graph = _single_program(source)
        self._num_ranks = source.num_ranks
        types = _types_of(graph)
        windows = _windows(graph, topological_order(graph), types)
        sequences = [flatten(window) for window in windows]
        epochs = -(-_TRAINED_SEQUENCES // len(sequences))
        model: DraftModel = (
            FrontierNgram(sequences)
            if learner == "n-gram"
            else Transformer(sequences, epochs=max(epochs, _FEWEST_EPOCHS), seed=seed)
        )
        self._synthesizer = Synthesizer(windows, novelty=novelty, drafts=_DRAFTS, model=model)
        self._rows_of_type: dict[int, list[int]] = {}
        for row, code in enumerate(types.tolist()):
            self._rows_of_type.setdefault(code, []).append(row)

    def workload(self, *, nodes: int = 0, seed: int = 0) -> Workload:
        """Return a job whose ranks run a new program of about ``nodes`` nodes (0: as many as the source).
        Equal arguments return equal jobs.
        """
        graph = self._graph
        count = max(1, round((nodes or len(graph)) / _WINDOW_NODES))
        drawn = self._synthesizer.sample(count, seed=seed)
        random = Random(f"hespas program {seed}")
        rows = [random.choice(self._rows_of_type[code]) for dag in drawn for code in dag.types.tolist()]
        data, control = _dependencies(drawn)
        program = take_nodes(graph, np.array(rows, np.int64), data, control)
        number, unnamed = np.arange(len(rows)), np.zeros(len(rows), np.int32)
        program = replace(
            program,
            name="synthetic",
            id=number.astype(np.uint64),
            strings=StringTable.from_strings(["", *(f"op_{row}" for row in range(len(rows)))]),
            name_id=(number + 1).astype(np.int32),
            op_id=unnamed,
            source_id=unnamed,
            framework_id=unnamed,
            types=replace(graph.types, encoding=np.zeros_like(graph.types.encoding)),
            collectives=replace(program.collectives, reduction=np.zeros_like(program.collectives.reduction)),
            extra=ExtraTable.empty(),
            attachments={},
        )
        return Workload.spmd(program, self._num_ranks)


def _single_program(source: Workload) -> OpGraph:
    graph = source.classes[0]
    if len(source.classes) > 1 or not source.is_complete or len(graph.p2p) or len(graph.regions):
        raise UnsupportedError(
            f"workload {source.name!r} cannot be learned: its ranks run different programs, exchange "
            "messages, or run loops",
            hint="use `method=template`",
        )
    if len(graph) < _FEWEST_WINDOWS * _WINDOW_NODES:
        raise UnsupportedError(
            f"workload {source.name!r} has {len(graph):,} operations, too few to learn from",
            hint=f"give one of {_FEWEST_WINDOWS * _WINDOW_NODES:,} and more, or use `method=template`",
        )
    return graph


def _types_of(graph: OpGraph) -> IntArray:
    """Return the type of each node: nodes of one type agree in kind, class, stream, collective and groups,
    and in the magnitude of FLOPs, traffic and payload.
    """
    collective = np.full(len(graph), -1, np.int64)
    groups = np.full(len(graph), -1, np.int64)
    payload = np.zeros(len(graph))
    table = graph.collectives
    collective[table.node], groups[table.node] = table.kind, table.group_set
    payload[table.node] = table.comm_bytes
    sizes = [np.nan_to_num(column) for column in (graph.flops, graph.bytes_moved, payload)]
    _, types = equal_rows(
        graph.kind,
        graph.op_class,
        graph.stream,
        collective,
        groups,
        *(np.rint(np.log2(np.maximum(size, 1.0)) * _BITS_PER_SIZE) for size in sizes),
    )
    return types


def _windows(graph: OpGraph, order: IntArray, types: IntArray) -> list[TypedDag]:
    """Return windows of a program, which overlap, with the dependencies inside each of them."""
    position = np.empty(len(graph), np.int64)
    position[order] = np.arange(len(graph))
    deps = all_deps(graph)
    consumer, producer = position[deps.row_ids], position[deps.values]
    typed = types[order]
    result = list[TypedDag]()
    for start in range(0, len(graph) - _WINDOW_NODES + 1, _STRIDE):
        chosen = (producer >= start) & (consumer < start + _WINDOW_NODES)
        edges = zip((producer[chosen] - start).tolist(), (consumer[chosen] - start).tolist(), strict=True)
        result.append(TypedDag.from_edges(typed[start : start + _WINDOW_NODES].tolist(), edges))
    return result


def _dependencies(windows: Sequence[TypedDag]) -> tuple[RaggedArray, RaggedArray]:
    """Return the data dependencies inside the windows, and the control dependencies between them: the nodes
    of a window without parents wait for the last node of the window before.
    """
    consumers, producers, waiting, awaited = (list[int]() for _ in range(4))
    start = 0
    for number, dag in enumerate(windows):
        consumers += (dag.targets + start).tolist()
        producers += (dag.sources + start).tolist()
        if number:
            roots = np.setdiff1d(np.arange(len(dag)), dag.targets) + start
            waiting += roots.tolist()
            awaited += [start - 1] * len(roots)
        start += len(dag)
    data = RaggedArray.from_pairs(np.array(consumers, np.int64), np.array(producers, np.int64), start)
    control = RaggedArray.from_pairs(np.array(waiting, np.int64), np.array(awaited, np.int64), start)
    return data, control
