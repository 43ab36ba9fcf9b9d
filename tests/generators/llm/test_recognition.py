"""Models recognised in the matmuls of programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.generators.llm.model import Attention, Mlp
from hespas.generators.llm.recognition import RecognisedStep, recognised_step
from hespas.graph import GraphBuilder, OpClass, OpGraph, dtype
from hespas.graph.errors import UnsupportedError

_Shape = tuple[int, int, int, int]


class _Sizes(NamedTuple):
    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 1376
    gated: bool = True
    vocab: int = 32000
    seq: int = 1024
    sequences: int = 3
    joined: bool = False
    grouped: bool = False

    def weights(self) -> Iterator[tuple[int, int]]:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield query, self.hidden
        if self.joined:
            yield self.hidden, query + 2 * key
        else:
            yield from ((self.hidden, width) for width in (query, key, key))
        yield self.ffn, self.hidden
        up = [self.ffn] * (2 if self.gated else 1)
        yield from ((self.hidden, width) for width in ([sum(up)] if self.joined else up))

    def scores(self) -> _Shape:
        group = self.heads // self.kv_heads if self.grouped else 1
        return self.sequences * self.heads // group, group * self.seq, self.seq, self.head_dim

    def matmuls(self, *, trains: bool = True, recomputed: str = "") -> Iterator[tuple[_Shape, int]]:
        """Return the matmuls of a step; layers are recomputed in ``torch`` or ``xla``, or not."""
        tokens = self.sequences * self.seq
        for rows, columns, times in (
            *((rows, columns, self.layers) for rows, columns in self.weights()),
            (self.hidden, self.vocab, 1),
        ):
            is_last = rows == self.ffn and recomputed == "xla"
            is_again = bool(recomputed) and columns != self.vocab and not is_last
            yield (1, tokens, columns, rows), times * (1 + is_again)
            if trains:
                yield (1, tokens, rows, columns), times
                yield (1, rows, columns, tokens), times
        batch, queries, keys, head_dim = self.scores()
        passes = self.layers * (1 + 2 * trains + bool(recomputed))
        yield (batch, queries, keys, head_dim), passes
        yield (batch, queries, head_dim, keys), passes


def _graph(sizes: _Sizes, *, trains: bool = True, recomputed: str = "") -> OpGraph:
    return _graph_of(list(sizes.matmuls(trains=trains, recomputed=recomputed)))


def _graph_of(matmuls: list[tuple[_Shape, int]], flops: float | None = None) -> OpGraph:
    builder, element = GraphBuilder("program"), dtype("bf16").code
    dot = builder.strings.add("dot")
    for (batch, m, n, k), times in matmuls:
        work = 2.0 * batch * m * n * k if flops is None else flops
        for _ in range(times):
            node = builder.add_node(name_id=dot, op_id=dot, op_class=OpClass.CONTRACTION, flops=work)
            builder.add_contraction(
                node, batch=batch, m=m, n=n, k=k, flops=work, useful_flops=work,
                lhs=element, rhs=element, accumulator=element,
            )  # fmt: skip
    return builder.build()


def _check(found: RecognisedStep, sizes: _Sizes, *, trains: bool = True) -> None:
    assert found.model.hidden == sizes.hidden
    assert found.model.vocab == sizes.vocab
    assert (found.seq, found.global_batch) == (sizes.seq, sizes.sequences)
    assert (found.dtype, found.trains) == ("bf16", trains)
    block = (
        Attention(heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim),
        Mlp(ffn=sizes.ffn, gated=sizes.gated, activation="silu" if sizes.gated else "gelu"),
    )
    assert found.model.layers == (block,) * sizes.layers


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        _Sizes(),
        _Sizes(joined=True),
        _Sizes(grouped=True),
        _Sizes(gated=False, ffn=2048, kv_heads=8),
        _Sizes(ffn=512, vocab=512, kv_heads=8),  # all weights have the same sizes
    ],
)
def test_sizes_are_recognised(sizes: _Sizes, trains: bool) -> None:
    _check(recognised_step(_graph(sizes, trains=trains)), sizes, trains=trains)


@pytest.mark.parametrize("recomputed", ["torch", "xla"])
def test_recomputation_is_recognised(recomputed: str) -> None:
    """XLA does not recompute the last matmul of a layer, because no gradient needs its result."""
    _check(recognised_step(_graph(_Sizes(), recomputed=recomputed)), _Sizes())


def test_a_patch_embedding_is_no_vocabulary() -> None:
    """The first matmul of a vision transformer has a weight of the hidden size too."""
    sizes = _Sizes()
    matmuls = [
        ((1, m, k, n) if sizes.vocab in (m, n, k) else (batch, m, n, k), times)
        for (batch, m, n, k), times in sizes.matmuls(trains=False)
    ]
    with pytest.raises(UnsupportedError, match="no dense decoder"):
        recognised_step(_graph_of(matmuls))


def test_small_matmuls_are_not_ignored() -> None:
    outer = ((1, 32, 1024, 1), 1)
    _check(recognised_step(_graph_of([*_Sizes().matmuls(), outer])), _Sizes())
    with pytest.raises(UnsupportedError, match="no dense decoder"):
        recognised_step(_graph_of([*_Sizes().matmuls(), ((1, 2, 2, 2), 1)]))


def test_tokens_of_a_decode_step_are_no_heads() -> None:
    """128 sequences with 32 heads read 128 keys of 128 elements each."""
    sizes = _Sizes(heads=32, kv_heads=32, head_dim=128, hidden=4096, sequences=128, seq=1)
    matmuls = [(shape, times) for shape, times in sizes.matmuls(trains=False) if shape[0] == 1]
    matmuls.append(((128 * 32, 1, 128, 128), 2 * sizes.layers))
    with pytest.raises(UnsupportedError, match="no dense decoder"):
        recognised_step(_graph_of(matmuls))


@given(st.data())
def test_another_matmul_is_no_decoder(data: st.DataObject) -> None:
    matmuls = list(_Sizes().matmuls())
    index = data.draw(st.integers(0, len(matmuls) - 1))
    (batch, m, n, k), times = matmuls[index]
    changed = data.draw(st.sampled_from([(batch, m + 1, n, k), (batch, m, n + 8, k), (batch + 1, m, n, k)]))
    matmuls[index] = changed, times
    with pytest.raises(UnsupportedError, match="no dense decoder"):
        recognised_step(_graph_of(matmuls))


@given(times=st.integers(0, 3), index=st.integers(0, 20))
def test_another_count_is_no_decoder(times: int, index: int) -> None:
    matmuls = list(_Sizes().matmuls())
    index %= len(matmuls)
    shape, own = matmuls[index]
    if times == own:
        return
    matmuls[index] = shape, times
    with pytest.raises(UnsupportedError, match="no dense decoder"):
        recognised_step(_graph_of(matmuls))


@pytest.mark.parametrize("shape", [(1, -1, 512, 512), (1, 0, 512, 512)])
def test_unknown_sizes_are_refused(shape: _Shape) -> None:
    with pytest.raises(UnsupportedError, match="are unknown"):
        recognised_step(_graph_of([(shape, 1)], flops=1e9))


def test_a_refusal_lists_the_largest_matmuls() -> None:
    matmuls = [((1, 8 * n, 64, 16), n) for n in range(1, 9)]
    listed = r"size\): 8 of 1x64x64x16, .*3 of 1x24x64x16, and 2 other sizes"
    with pytest.raises(UnsupportedError, match=listed):
        recognised_step(_graph_of(matmuls))


def test_a_program_without_matmuls_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="it has no matmuls"):
        recognised_step(_graph_of([]))
