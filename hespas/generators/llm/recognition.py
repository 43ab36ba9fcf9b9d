"""Recognition of a decoder model in the matmuls of a program of one device.

The matmuls of a dense decoder determine its sizes. Each matmul with a weight has the tokens of the step and
the two sizes of the weight as its dimensions, and all weights share the hidden size. Matmuls of attention
have a batch of sequences times heads, and the sequence length and the size of a head as dimensions. The
number of matmuls per weight gives the direction (one in inference, three in training, four with full
recomputation).

All assignments of sizes to weights are tried. An assignment counts only if it explains every matmul of the
program exactly, so that most other kinds of models are refused. Products with a dimension of 1, such as the
angles of rotary embeddings, are ignored. Matmuls do not show masks: encoders are read as decoders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from hespas.generators.llm.model import Attention, Mlp, Model
from hespas.generators.llm.model_file import MOST_LAYERS
from hespas.graph import OpGraph
from hespas.graph.columns import DTYPES
from hespas.graph.errors import UnsupportedError, clipped

__all__ = ["RecognisedStep", "recognised_step"]

_MOST_WEIGHTS = 6
"""Limit of weights of different sizes: a dense decoder has at most five."""
_MOST_LISTED = 6
"""Limit of matmuls in the message of a refusal."""
_MOST_HEADS, _LEAST_HEAD_SIZE = 4096, 8

_Counts = Counter[tuple[int, ...]]


class RecognisedStep(NamedTuple):
    """Decoder model of a program, with its sequence length, the sequences per step, the element type of its
    matmuls, and whether gradients are computed.
    """

    model: Model
    seq: int
    global_batch: int
    dtype: str
    trains: bool


class _Passes(NamedTuple):
    """Matmuls per weight of a layer, per down-projection of a layer, per weight of the head, and of attention
    per layer.
    """

    layer: int
    down: int
    head: int
    attention: int


_PASSES = (
    _Passes(1, 1, 1, 2),
    _Passes(3, 3, 3, 6),
    _Passes(3, 3, 3, 7),
    _Passes(3, 3, 3, 8),
    _Passes(4, 4, 3, 8),
    _Passes(4, 4, 3, 9),
    _Passes(4, 3, 3, 8),
    _Passes(4, 3, 3, 9),
)
"""Inference; training; training with a recomputing backward pass of attention, in a fused kernel or as
separate matmuls; and training with full recomputation, with either backward pass. XLA does not recompute the
last matmul of a layer, because no gradient needs its result.
"""


def recognised_step(graph: OpGraph) -> RecognisedStep:
    """Return the dense decoder whose matmuls are exactly the matmuls of ``graph``, a program of one device.

    Norms, positions and biases do not follow from matmuls: they are RMS norms, rotary embeddings and no
    biases. Raises ``UnsupportedError`` if no model or several models have these matmuls.
    """
    table = graph.contractions
    if len(graph.collectives):
        raise _refusal(graph, "it has collectives, so that its weights may be divided already")
    dims = np.stack([table.batch, table.m, table.n, table.k], axis=1).astype(np.int64)
    executions = graph.executions[table.node]
    if not np.isfinite(executions).all() or (executions % 1).any() or (dims < 1).any():
        raise _refusal(graph, "the sizes or the number of some matmuls are unknown")
    shapes, of_shape = np.unique(dims, axis=0, return_inverse=True)
    times = np.bincount(of_shape.ravel(), executions, len(shapes))
    is_matmul = (shapes[:, 1:] > 1).all(axis=1)
    shapes, times = shapes[is_matmul], times[is_matmul]
    attention: _Counts = Counter()
    products: _Counts = Counter()
    contracted: _Counts = Counter()
    for (batch, *sizes), count in zip(shapes.tolist(), times.tolist(), strict=True):
        if batch > 1:
            attention[batch, *sorted(sizes)] += int(count)
        else:
            products[tuple(sorted(sizes))] += int(count)
            contracted[*sorted(sizes), sizes[-1]] += int(count)
    steps = dict.fromkeys(_steps(clipped(graph.name), attention, products, contracted))
    if len(steps) != 1:
        if not len(shapes):
            raise _refusal(graph, "it has no matmuls")
        models = "several models have" if steps else "no dense decoder has"
        largest = np.argsort(-times * shapes.prod(axis=1), kind="stable")[:_MOST_LISTED]
        sizes_text = ", ".join(f"{times[row]:,.0f} of {'x'.join(map(str, shapes[row]))}" for row in largest)
        more = f", and {len(shapes) - len(largest)} other sizes" if len(shapes) > len(largest) else ""
        raise _refusal(
            graph,
            f"{models} exactly its matmuls (batch x rows x columns x contracted size): {sizes_text}{more}",
        )
    [(model, seq, sequences, trains)] = steps
    codes, position = np.unique(table.lhs, return_inverse=True)
    code = int(codes[np.argmax(np.bincount(position.ravel(), table.flops * executions))])
    return RecognisedStep(model, seq, sequences, DTYPES[code].name if code >= 0 else "", trains)


def _refusal(graph: OpGraph, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{clipped(graph.name) or 'the program'}: {reason}",
        hint="name the model instead: hespas plan MODEL, or write its sizes in a model file",
    )


def _steps(
    name: str, attention: _Counts, products: _Counts, contracted: _Counts
) -> Iterator[tuple[Model, int, int, bool]]:
    """Yield the models whose matmuls are these, with the sequence length, the sequences and the direction.

    Keys are the sorted sizes of a matmul. Keys of ``contracted`` have the contracted size at the end.
    """
    if len(attention) != 1 or not 0 < len(products) <= _MOST_WEIGHTS:
        return
    [((batch, *sizes), attention_matmuls)] = attention.items()
    for passes, (seq, head_dim, group) in product(_PASSES, _head_sizes(sizes)):
        layers, rest = divmod(attention_matmuls, passes.attention)
        if rest or not 0 < layers <= MOST_LAYERS:
            continue
        for tokens in _common_sizes(products):
            sequences, rest = divmod(tokens, seq)
            if rest or not sequences or batch % sequences:
                continue
            heads = batch // sequences * group
            if heads > _MOST_HEADS:
                continue
            weights = {_without(shape, tokens): shape for shape in products}
            for hidden in _common_sizes(weights):
                shape_of = {_without(sizes, hidden)[0]: shape for sizes, shape in weights.items()}
                for model in _models(
                    name,
                    Counter({size: products[shape] for size, shape in shape_of.items()}),
                    {
                        size: (contracted[*shape, tokens], contracted[*shape, hidden])
                        for size, shape in shape_of.items()
                        if shape.count(tokens) == 1
                    },
                    passes,
                    layers=layers,
                    hidden=hidden,
                    heads=heads,
                    head_dim=head_dim,
                    group=group,
                ):
                    yield model, seq, sequences, passes.layer > 1


def _common_sizes(shapes: Iterable[tuple[int, ...]]) -> list[int]:
    first, *others = shapes
    return sorted(size for size in set(first) if all(size in shape for shape in others))


def _head_sizes(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield sequence lengths, head sizes, and query heads that one matmul of attention takes together."""
    for index, head_dim in enumerate(sizes):
        short, long = sorted(sizes[:index] + sizes[index + 1 :])
        if long % short == 0 and head_dim >= _LEAST_HEAD_SIZE:
            yield short, head_dim, long // short


def _without(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    index = shape.index(size)
    return shape[:index] + shape[index + 1 :]


def _models(
    name: str,
    others: Counter[int],
    contractions: Mapping[int, tuple[int, int]],
    passes: _Passes,
    *,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    group: int,
) -> Iterator[Model]:
    """Yield the models whose weights of the ``hidden`` size have exactly the sizes and counts ``others``.

    ``contractions`` has the numbers of matmuls that contract the tokens, as gradients of weights do, and the
    hidden size, as the head does, by the size of the weight.
    """
    key_heads = [heads // group] if group > 1 else [size for size in range(1, heads + 1) if heads % size == 0]
    sizes = [size for size in others if size > 1]
    fused = {size // 2 for size in sizes if size % 2 == 0}
    for kv_heads, vocab, gated in product(key_heads, sizes, (True, False)):
        for ffn, joins_heads, joins_gate in product({*sizes, *fused}, (False, True), (False, True)):
            if joins_gate and not gated:
                continue
            layer = Counter({heads * head_dim: 1})
            if joins_heads:
                layer[(heads + 2 * kv_heads) * head_dim] += 1
            else:
                layer[heads * head_dim] += 1
                layer[kv_heads * head_dim] += 2
            layer[ffn] += 1 if joins_gate or not gated else 2
            layer[2 * ffn if joins_gate else ffn] += 1
            expected = Counter({size: count * layers * passes.layer for size, count in layer.items()})
            expected[ffn] -= layers * (passes.layer - passes.down)
            expected[vocab] += passes.head
            is_trained = passes.layer > 1
            if expected == others and all(
                gradients == is_trained * (layer[size] * layers + (size == vocab))
                and (size != vocab or size in {*layer, hidden} or of_hidden == 1)
                for size, (gradients, of_hidden) in contractions.items()
            ):
                block = (
                    Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim),
                    Mlp(ffn=ffn, gated=gated, activation="silu" if gated else "gelu"),
                )
                yield Model(name=name, hidden=hidden, vocab=vocab, layers=(block,) * layers)
