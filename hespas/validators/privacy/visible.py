"""What a workload still shows, and how many public models agree with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.generators.llm.model import Mlp, Model
from hespas.generators.llm.model_file import load_model, model_names
from hespas.generators.obfuscate import Key, VisibleFact
from hespas.generators.obfuscate.layers import repeated_runs, signatures
from hespas.graph import ESTIMATED_ON, NodeKind, Workload, step_facts
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["visible_facts"]

_EXAMPLES = 6
_MOST_SPLIT = 8
"""Largest number of parts into which a layout is assumed to split an extent, a power of two."""


def visible_facts(workload: Workload) -> tuple[VisibleFact, ...]:
    """Return the facts of a workload that may identify its model, its site or its size. O(nodes)."""
    graphs = workload.classes
    extents: set[int] = set()
    repeats: set[int] = set()
    names: set[str] = set()
    operations: set[str] = set()
    for graph in graphs:
        table = graph.contractions
        for values in (graph.types.dims, table.m, table.n, table.k):
            extents.update(values[values > 1].tolist())
        repeats.update(run.repeats for run in repeated_runs(signatures(graph)))
        rows = np.unique(np.concatenate([graph.name_id, graph.source_id, graph.framework_id]))
        names.update(graph.strings[row] for row in rows.tolist())
        operations.update(graph.strings[row] for row in np.unique(graph.op_id).tolist())
    readable = {text for text in names | operations if text and not Key.is_token(text)}
    models = [load_model(name) for name in model_names()]
    estimated_on = workload.metadata.get(ESTIMATED_ON, "")
    step_texts = {f"estimated on {estimated_on}"} if estimated_on else set[str]()
    step = step_facts(workload.metadata)
    if step is not None:
        texts_of_step = {"kind": step.kind, "dtype": step.dtype, "launch": step.launch, "device": step.device}
        texts_of_step |= {"tokens": f"{step.tokens:.0f}" if step.tokens > 0 else ""}
        step_texts |= {f"{name} {text}" for name, text in texts_of_step.items() if text}
    facts = [
        _texts("readable names", readable - operations),
        _texts("readable operations", readable & operations),
        VisibleFact(
            fact="extents of shapes",
            distinct=len(extents),
            examples=_listed(sorted(extents, reverse=True)),
            models=sum(_agrees(model, extents) for model in models) if extents else -1,
        ),
        VisibleFact(
            fact="repeats of layers",
            distinct=len(repeats),
            examples=_listed(sorted(repeats)),
            models=sum(len(model.layers) in repeats for model in models) if repeats else -1,
        ),
        _numbers("FLOPs of operations", [g.flops[g.kind == int(NodeKind.COMPUTE)] for g in graphs]),
        _numbers("times of operations [ns]", [graph.duration_ns for graph in graphs]),
        _numbers("sizes of collectives [bytes]", [graph.collectives.comm_bytes for graph in graphs]),
        _numbers("sizes of messages [bytes]", [graph.p2p.comm_bytes for graph in graphs]),
        _numbers("ranks", [np.array([workload.num_ranks])]),
        _texts("facts of the step", step_texts),
    ]
    return tuple(fact for fact in facts if fact.distinct)


def _texts(fact: str, texts: set[str]) -> VisibleFact:
    return VisibleFact(fact=fact, distinct=len(texts), examples=_listed(sorted(texts)))


def _numbers(fact: str, columns: Sequence[FloatArray | IntArray]) -> VisibleFact:
    values = np.unique(np.concatenate(columns))
    values = values[np.isfinite(values) & (values > 0)]
    shown = [f"{value:.6g}" for value in values[::-1][:_EXAMPLES].tolist()]
    return VisibleFact(fact=fact, distinct=len(values), examples=_listed(shown, len(values)))


def _listed(values: list[int] | list[str], count: int = -1) -> str:
    shown = ", ".join(str(value) for value in values[:_EXAMPLES])
    return shown + (", ..." if max(count, len(values)) > _EXAMPLES else "")


def _agrees(model: Model, extents: set[int]) -> bool:
    """Return True if the hidden size, the widest feed-forward block and the vocabulary of a model occur among
    the extents, whole or split over a power of two of ranks.
    """
    wide = max((block.ffn for layer in model.layers for block in layer if isinstance(block, Mlp)), default=0)
    parts = [1 << bits for bits in range(_MOST_SPLIT.bit_length())]

    def occurs(size: int) -> bool:
        return size == 0 or any(size // part in extents for part in parts if size % part == 0)

    gated = occurs(wide) or occurs(2 * wide)
    return model.hidden in extents and gated and occurs(model.vocab)
