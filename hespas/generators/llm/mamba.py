"""Mamba-2 blocks on one rank, forward and backward (arXiv 2405.21060, section 6), and in serving.

A sequence is divided into chunks of Q tokens; the last chunk is padded. For a head of P dimensions and a
state of N dimensions, each chunk needs four matrix products: scores within the chunk (Q x Q x N, once per
group of heads), scores times values (Q x P x Q), the final state of the chunk (N x P x Q), and the
contribution of the previous state (Q x P x N). Heads are divided over tensor-parallel ranks. The transfer of
states between context-parallel ranks is not modelled.

In serving, each sequence has a state of P x N for each head and the last inputs of its convolution. A prompt
is scanned in separate chunks, which store both. Decoded tokens pass the recurrence, in one kernel that reads
and writes the states of all sequences (``selective_state_update`` of the library of the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hespas.generators.llm.flops import attention_flops
from hespas.generators.llm.kernels import KernelWriter, TensorSpec, Value
from hespas.generators.llm.model import Mamba, mamba_channels, mamba_projected
from hespas.generators.llm.rank import LinearLayer, ModelRank
from hespas.graph import OpClass

__all__ = ["ScannedBatch", "backward_mamba", "forward_mamba", "scanned_chunks", "served_states"]


class ScannedBatch(NamedTuple):
    """Batch of ``batch`` sequences with ``tokens`` new tokens each. ``resumes`` is True if the sequences have
    a state from earlier tokens. ``steps`` is True if the recurrence processes tokens one by one, otherwise in
    chunks.
    """

    batch: int
    tokens: int
    resumes: bool = False
    steps: bool = False


def served_states(r: ModelRank, block: Mamba, batch: int) -> tuple[TensorSpec, TensorSpec]:
    """Return the cached tensors of ``batch`` sequences on a rank: the states in 32 bits, and the last inputs
    of the convolutions.
    """
    tp = r.layout.tp
    return (
        TensorSpec((batch, block.heads // tp, block.head_dim, block.state), "f32"),
        TensorSpec((batch, mamba_channels(block) // tp, block.conv - 1), r.precision.compute),
    )


def scanned_chunks(r: ModelRank, block: Mamba) -> tuple[int, int]:
    """Return the number of chunks in a micro-batch on a rank, and the tokens per chunk."""
    return _chunks(block, ScannedBatch(r.training.micro_batch, r.training.seq // r.layout.cp))


def _chunks(block: Mamba, scanned: ScannedBatch) -> tuple[int, int]:
    chunk = min(block.chunk, scanned.tokens)
    return scanned.batch * -(-scanned.tokens // chunk), chunk


def _layers(r: ModelRank, block: Mamba) -> tuple[LinearLayer, LinearLayer]:
    tp = r.layout.tp
    return (
        LinearLayer(name="in_proj", inputs=r.hidden, outputs=mamba_projected(block) // tp, rows=r.tokens),
        LinearLayer(name="out_proj", inputs=block.inner // tp, outputs=r.hidden, rows=r.tokens),
    )


def _scan(
    r: ModelRank,
    k: KernelWriter,
    block: Mamba,
    x: Value,
    *,
    chunks: tuple[int, int],
    suffix: str = "",
    backward: bool = False,
) -> Value:
    """Add the matrix products of all chunks. In the backward pass, each of them becomes two products for the
    gradients.
    """
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
        for side in (".left", ".right") if backward else ("",):
            x = k.product(
                f"scan.{name}{suffix}{side}",
                (m, n, inner),
                left=compute,
                result=compute,
                batch=batch,
                op="mamba_chunk_scan",
                after=[x],
            )
    return x


def _served(
    r: ModelRank, k: KernelWriter, block: Mamba, wide: Value, *, scanned: ScannedBatch, suffix: str
) -> Value:
    """Add the convolution and the scan in serving, where sequences have cached states."""
    tokens, compute = scanned.batch * scanned.tokens, r.precision.compute
    states, inputs = served_states(r, block, scanned.batch)
    mixed = r.value(tokens, mamba_channels(block) // r.layout.tp)
    x: Value = k.node(
        f"conv1d{suffix}",
        "causal_conv1d_update" if scanned.steps else "causal_conv1d_fn",
        OpClass.ELEMENTWISE,
        [mixed, inputs] if scanned.resumes else [mixed],
        [mixed],
        flops=2.0 * block.conv * tokens * mixed.shape[1],
        transcendentals=float(tokens * mixed.shape[1]),
        bytes_written=k.bytes_of(mixed) + k.bytes_of(inputs),
        after=[wide],
    )
    if not scanned.steps:
        x = _scan(r, k, block, x, chunks=_chunks(block, scanned), suffix=suffix)
        before = [states] if scanned.resumes else []
        return k.vector(f"scan.store{suffix}", "copy", before, [states], after=[x], in_place=True)
    heads, values = states.shape[1], TensorSpec((tokens, block.inner // r.layout.tp), compute)
    steps = TensorSpec((tokens, heads), "f32")
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
    r: ModelRank, k: KernelWriter, block: Mamba, key: str, x: Value, *, served: Sequence[ScannedBatch] = ()
) -> Value:
    """Add a Mamba block for a micro-batch in training, or for the sequences in ``served``. ``x`` and the
    result are the residual stream before and after it.
    """
    inside, outside = _layers(r, block)
    normed = r.norm(k, "norm", x, f"{key}.norm")
    wide = r.column(k, inside, normed, f"{key}.in_input", f"{key}.wide")
    scanned: list[Value] = [
        _served(r, k, block, wide, scanned=batch, suffix=f".{number}") for number, batch in enumerate(served)
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
    return r.add_block(k, key, x, r.row(k, outside, y))


def backward_mamba(r: ModelRank, k: KernelWriter, block: Mamba, key: str, grad: Value) -> Value:
    """Add the backward pass of a Mamba block, and return the gradient of its input."""
    inside, outside = _layers(r, block)
    inner = r.row_backward(k, outside, r.add_block_backward(k, key, grad), f"{key}.gated")
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
