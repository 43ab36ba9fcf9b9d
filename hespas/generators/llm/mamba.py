"""Mamba-2 blocks on one rank, forward and backward (arXiv 2405.21060, section 6).

A sequence is cut in chunks of Q tokens. Per chunk and head of P dimensions with a state of N: scores within
the chunk (Q x Q x N, once for each group of heads), their product with the values (Q x P x Q), the state
that the chunk leaves (N x P x Q), and what the state before it adds (Q x P x N). Heads part over tensor
ranks; context ranks hand states on, which is not split further here.
"""

from __future__ import annotations

from hespas.generators.llm.kernels import Kernels, Value
from hespas.generators.llm.model import Mamba, mamba_projected
from hespas.generators.llm.rank import Linear, Rank

__all__ = ["backward_mamba", "forward_mamba"]


def _layers(r: Rank, block: Mamba) -> tuple[Linear, Linear]:
    tp = r.layout.tp
    return (
        Linear(name="in_proj", inputs=r.hidden, outputs=mamba_projected(block) // tp, rows=r.tokens),
        Linear(name="out_proj", inputs=block.inner // tp, outputs=r.hidden, rows=r.tokens),
    )


def _scan(r: Rank, k: Kernels, block: Mamba, x: Value, port: str, *, backward: bool) -> Value:
    """The products of all chunks; backward each has two gradients."""
    tp, compute, suffix = r.layout.tp, r.precision.compute, ".backward" if backward else ""
    chunk = min(block.chunk, r.training.seq)
    chunks, heads = max(1, r.tokens // chunk), block.heads // tp
    groups = max(1, block.groups // tp)
    sizes = {
        "scores": (chunks * groups, chunk, chunk, block.state),
        "values": (chunks * heads, chunk, block.head_dim, chunk),
        "states": (chunks * heads, block.state, block.head_dim, chunk),
        "carried": (chunks * heads, chunk, block.head_dim, block.state),
    }
    for name, (batch, m, n, inner) in sizes.items():
        for way in ("left", "right") if backward else ("",):
            called = f"scan.{name}{suffix}{'.' if way else ''}{way}"
            x = k.product(called, (m, n, inner), left=compute, result=compute, batch=batch, after=[x])
    k.name_port(port, x)
    return x


def forward_mamba(r: Rank, k: Kernels, block: Mamba, key: str, x: Value) -> Value:
    """A block, from the residual stream to the residual stream."""
    inside, outside = _layers(r, block)
    normed = r.norm(k, "norm", x, f"{key}.norm")
    wide = r.column(k, inside, normed, f"{key}.in_input", f"{key}.wide")
    mixed = r.value(r.tokens, inside.outputs - outside.inputs)
    y: Value = k.vector("conv1d", "conv1d", [mixed], [mixed], after=[wide], port=f"{key}.mixed")
    y = _scan(r, k, block, y, f"{key}.scanned", backward=False)
    inner = r.value(r.tokens, outside.inputs)
    y = k.vector("gated_norm", "rms_norm", [inner, inner], [inner], after=[y, wide], port=f"{key}.gated")
    return r.added(k, key, x, r.row(k, outside, y))


def backward_mamba(r: Rank, k: Kernels, block: Mamba, key: str, grad: Value) -> Value:
    """The gradient of what entered a block."""
    inside, outside = _layers(r, block)
    inner = r.row_backward(k, outside, r.added_backward(k, key, grad), f"{key}.gated")
    values = r.value(r.tokens, outside.inputs)
    reads, after = [values, values, values], [inner, f"{key}.scanned", f"{key}.wide"]
    inner = k.vector("gated_norm.backward", "rms_norm_backward", reads, [values, values], after=after)
    first: Value = k.vector("scan.start", "copy", [values], [values], after=[inner, f"{key}.mixed"])
    inner = _scan(r, k, block, first, "", backward=True)
    mixed = r.value(r.tokens, inside.outputs - outside.inputs)
    inner = k.vector(
        "conv1d.backward", "conv1d", [mixed, mixed], [mixed], after=[inner, f"{key}.wide"], scale=2.0
    )
    back = r.column_backward(k, inside, inner, f"{key}.in_input")
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)
