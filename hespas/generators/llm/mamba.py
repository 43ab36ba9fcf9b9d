"""Mamba-2 blocks on one rank, forward and backward (arXiv 2405.21060, section 6), and as they serve.

A sequence is cut in chunks of Q tokens, the last one filled up. Per chunk and head of P dimensions with a
state of N: scores within the chunk (Q x Q x N, once for each group of heads), their product with the values
(Q x P x Q), the state that the chunk leaves (N x P x Q), and what the state before it adds (Q x P x N). Heads
part over tensor ranks; context ranks hand states on, which is not split further here.

Serving, each sequence has a state of P x N for each head and the last inputs of its convolution. A prompt is
scanned in its own chunks and leaves them; tokens that are decoded pass the recurrence, one kernel that reads
and writes the states of all sequences (``selective_state_update`` of the library of the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hespas.generators.llm.flops import attention_flops
from hespas.generators.llm.kernels import Kernels, Tensor, Value
from hespas.generators.llm.model import Mamba, mamba_channels, mamba_projected
from hespas.generators.llm.rank import Linear, Rank
from hespas.graph import OpClass

__all__ = ["Scanned", "backward_mamba", "forward_mamba", "scanned_chunks", "served_states"]


class Scanned(NamedTuple):
    """``batch`` sequences of so many new ``tokens`` each; ``resumes``: they have a state before; ``steps``:
    their tokens pass the recurrence, not chunks.
    """

    batch: int
    tokens: int
    resumes: bool = False
    steps: bool = False


def served_states(r: Rank, block: Mamba, batch: int) -> tuple[Tensor, Tensor]:
    """What a rank keeps of ``batch`` sequences: states, in 32 bits, and the last inputs of convolutions."""
    tp = r.layout.tp
    return (
        Tensor((batch, block.heads // tp, block.head_dim, block.state), "f32"),
        Tensor((batch, mamba_channels(block) // tp, block.conv - 1), r.precision.compute),
    )


def scanned_chunks(r: Rank, block: Mamba) -> tuple[int, int]:
    """Chunks of a micro-batch on a rank, and their length."""
    return _chunks(block, Scanned(r.training.micro_batch, r.training.seq // r.layout.cp))


def _chunks(block: Mamba, each: Scanned) -> tuple[int, int]:
    chunk = min(block.chunk, each.tokens)
    return each.batch * -(-each.tokens // chunk), chunk


def _layers(r: Rank, block: Mamba) -> tuple[Linear, Linear]:
    tp = r.layout.tp
    return (
        Linear(name="in_proj", inputs=r.hidden, outputs=mamba_projected(block) // tp, rows=r.tokens),
        Linear(name="out_proj", inputs=block.inner // tp, outputs=r.hidden, rows=r.tokens),
    )


def _scan(
    r: Rank,
    k: Kernels,
    block: Mamba,
    x: Value,
    *,
    chunks: tuple[int, int],
    suffix: str = "",
    backward: bool = False,
) -> Value:
    """The products of all chunks; backward each has two gradients."""
    tp, compute = r.layout.tp, r.precision.compute
    count, chunk = chunks
    heads, groups = block.heads // tp, max(1, block.groups // tp)
    sizes = {
        "scores": (count * groups, chunk, chunk, block.state),
        "values": (count * heads, chunk, block.head_dim, chunk),
        "states": (count * heads, block.state, block.head_dim, chunk),
        "carried": (count * heads, chunk, block.head_dim, block.state),
    }
    for name, (batch, m, n, inner) in sizes.items():
        for way in ("left", "right") if backward else ("",):
            called = f"scan.{name}{suffix}{'.' if way else ''}{way}"
            x = k.product(called, (m, n, inner), left=compute, result=compute, batch=batch, after=[x])
    return x


def _served(r: Rank, k: Kernels, block: Mamba, wide: Value, *, each: Scanned, suffix: str) -> Value:
    """Convolution and scan of sequences that have states."""
    tokens, compute = each.batch * each.tokens, r.precision.compute
    states, inputs = served_states(r, block, each.batch)
    mixed = r.value(tokens, mamba_channels(block) // r.layout.tp)
    x: Value = k.node(
        f"conv1d{suffix}",
        "causal_conv1d_update" if each.steps else "causal_conv1d_fn",
        OpClass.ELEMENTWISE,
        [mixed, inputs] if each.resumes else [mixed],
        [mixed],
        flops=2.0 * block.conv * tokens * mixed.shape[1],
        transcendentals=float(tokens * mixed.shape[1]),
        bytes_written=k.bytes_of(mixed) + k.bytes_of(inputs),
        after=[wide],
    )
    if not each.steps:
        x = _scan(r, k, block, x, chunks=_chunks(block, each), suffix=suffix)
        before = [states] if each.resumes else []
        return k.vector(f"scan.store{suffix}", "copy", before, [states], after=[x], in_place=True)
    heads, values = states.shape[1], Tensor((tokens, block.inner // r.layout.tp), compute)
    steps = Tensor((tokens, heads), "f32")
    return k.node(
        f"state_update{suffix}",
        "selective_state_update",
        OpClass.ELEMENTWISE,
        [mixed, steps, states],
        [values],
        flops=tokens * attention_flops(block, 1) / r.layout.tp,
        transcendentals=float(tokens * heads),
        bytes_written=k.bytes_of(values) + k.bytes_of(states),
        after=[x],
    )


def forward_mamba(
    r: Rank, k: Kernels, block: Mamba, key: str, x: Value, *, served: Sequence[Scanned] = ()
) -> Value:
    """A block, from the residual stream to the residual stream: of a micro-batch, or of ``served``
    sequences.
    """
    inside, outside = _layers(r, block)
    normed = r.norm(k, "norm", x, f"{key}.norm")
    wide = r.column(k, inside, normed, f"{key}.in_input", f"{key}.wide")
    scanned: list[Value] = [
        _served(r, k, block, wide, each=each, suffix=f".{place}") for place, each in enumerate(served)
    ]
    if not served:
        mixed = r.value(r.tokens, inside.outputs - outside.inputs)
        y = k.vector("conv1d", "conv1d", [mixed], [mixed], after=[wide], port=f"{key}.mixed")
        scanned = [_scan(r, k, block, y, chunks=scanned_chunks(r, block))]
        k.name_port(f"{key}.scanned", scanned[0])
    inner = r.value(r.tokens, outside.inputs)
    y = k.vector(
        "gated_norm", "rms_norm", [inner, inner], [inner], after=[*scanned, wide], port=f"{key}.gated"
    )
    return r.added(k, key, x, r.row(k, outside, y))


def backward_mamba(r: Rank, k: Kernels, block: Mamba, key: str, grad: Value) -> Value:
    """The gradient of what entered a block."""
    inside, outside = _layers(r, block)
    inner = r.row_backward(k, outside, r.added_backward(k, key, grad), f"{key}.gated")
    values = r.value(r.tokens, outside.inputs)
    reads, after = [values, values, values], [inner, f"{key}.scanned", f"{key}.wide"]
    inner = k.vector("gated_norm.backward", "rms_norm_backward", reads, [values, values], after=after)
    first: Value = k.vector("scan.start", "copy", [values], [values], after=[inner, f"{key}.mixed"])
    inner = _scan(r, k, block, first, chunks=scanned_chunks(r, block), suffix=".backward", backward=True)
    mixed = r.value(r.tokens, inside.outputs - outside.inputs)
    inner = k.vector(
        "conv1d.backward", "conv1d", [mixed, mixed], [mixed], after=[inner, f"{key}.wide"], scale=2.0
    )
    back = r.column_backward(k, inside, inner, f"{key}.in_input")
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)
