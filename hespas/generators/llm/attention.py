"""Attention on one rank: grouped queries and latent attention, forward and backward.

Context ranks gather keys and values of the whole sequence and send gradients back, or share it as
:mod:`hespas.generators.llm.context` says. With a causal mask each rank has an early and a late piece of the
sequence, so that all have equal work.
"""

from __future__ import annotations

from hespas.generators.llm.context import Exchange, ring_backward, ring_forward
from hespas.generators.llm.kernels import AttentionShape, Kernels, Tensor, Value
from hespas.generators.llm.model import Attention, LatentAttention
from hespas.generators.llm.rank import Linear, Rank
from hespas.graph import CollectiveKind

__all__ = [
    "attended_pairs",
    "attention_shape",
    "backward_attention",
    "core_again",
    "exchange_again",
    "forward_attention",
    "heads_of",
    "latent_layers",
    "latent_up",
    "projection",
    "qkv_layer",
    "queries_and_keys",
]


def heads_of(r: Rank, block: Attention | LatentAttention) -> tuple[int, int]:
    """Query and key heads of a rank: keys are repeated where there are fewer than ranks."""
    kv = block.kv_heads if isinstance(block, Attention) else block.heads
    return block.heads // r.layout.tp, max(1, kv // r.layout.tp)


def attention_shape(r: Rank, block: Attention | LatentAttention) -> AttentionShape:
    """Sizes of attention on a rank. Context ranks have two pieces of a sequence each, one early and one late,
    so that each has the same part of a causal mask, or all of it for some heads.
    """
    seq, cp = r.training.seq, r.layout.cp
    heads, kv_heads = heads_of(r, block)
    if r.layout.context_all_to_all:
        heads, kv_heads, cp = heads // cp, max(1, kv_heads // cp), 1
    value = block.v_dim if isinstance(block, LatentAttention) else block.head_dim
    window = (block.window, block.chunk) if isinstance(block, Attention) else (0, 0)
    return AttentionShape(
        batch=r.training.micro_batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=seq // cp,
        keys=seq,
        head_dim=block.head_dim,
        value_dim=value,
        pairs=attended_pairs(seq, *window, causal=r.training.causal) / cp,
    )


def attended_pairs(seq: int, window: int = 0, chunk: int = 0, *, causal: bool = True) -> float:
    """Pairs of query and key of a sequence that no mask hides: s (s + 1) / 2 causal ones; of a window of w
    keys (itself counted) w s - w (w - 1) / 2, of chunks that of each.
    """
    if chunk and chunk < seq:
        whole, rest = divmod(seq, chunk)
        return whole * attended_pairs(chunk, causal=causal) + attended_pairs(rest, causal=causal)
    if not causal:
        return float(seq) * (min(2 * window + 1, seq) if window else seq)
    reach = min(window or seq, seq)
    return reach * (reach + 1) / 2 + (seq - reach) * reach


def qkv_layer(r: Rank, block: Attention) -> Linear:
    """The projection to a rank's queries, keys and values."""
    heads, kv_heads = heads_of(r, block)
    return Linear(
        name="qkv",
        inputs=r.hidden,
        outputs=block.head_dim * (heads + 2 * kv_heads),
        rows=r.tokens,
        adapter=r.adapter(block),
    )


def latent_layers(r: Rank, block: LatentAttention) -> tuple[Linear, ...]:
    """Down-projections, whole on every tensor rank; up-projections of queries, of keys and values."""
    heads, adapter = block.heads // r.layout.tp, r.adapter(block)
    low, keys = block.q_lora + block.kv_lora + block.rope_dim, heads * (block.nope_dim + block.v_dim)
    down = Linear(name="qkv_down", inputs=r.hidden, outputs=low, rows=r.rows, adapter=adapter)
    q_up = Linear(
        name="q_up",
        inputs=block.q_lora or r.hidden,
        outputs=heads * block.head_dim,
        rows=r.tokens,
        adapter=adapter,
    )
    kv_up = Linear(name="kv_up", inputs=block.kv_lora, outputs=keys, rows=r.tokens, adapter=adapter)
    return down, q_up, kv_up


def queries_and_keys(r: Rank, k: Kernels, block: Attention | LatentAttention, key: str, norm: Value) -> Value:
    """Queries, keys and values with positions: the port ``qkv``."""
    heads, kv_heads = heads_of(r, block)
    if isinstance(block, Attention):
        out = r.column(k, qkv_layer(r, block), norm, f"{key}.qkv_input")
        turned = Tensor((r.tokens, (heads + kv_heads) * block.head_dim), r.precision.compute)
        if block.qk_norm:
            out = k.vector("qk_norm", "rms_norm", [turned], [turned], after=[out], port=f"{key}.qk_normed")
    else:
        down, *_ = latent_layers(r, block)
        low = r.linear(k, down, norm)
        lora = r.value(r.rows, down.outputs - block.rope_dim)
        low = k.vector("latent_norm", "rms_norm", [lora], [lora], after=[low], port=f"{key}.latent")
        return latent_up(r, k, block, key, low)
    if r.model.positions != "rope":
        k.name_port(f"{key}.qkv", out)
        return out
    return k.vector("rope", "rope", [turned], [turned], after=[out], port=f"{key}.qkv")


def latent_up(r: Rank, k: Kernels, block: LatentAttention, key: str, low: Value) -> Value:
    """Queries, keys and values of latent attention from its latents, with positions: the port ``qkv``."""
    heads = heads_of(r, block)[0]
    down, q_up, kv_up = latent_layers(r, block)
    low = r.gather_columns(k, "latent.all_gather", low, down.outputs)
    q = r.linear(k, q_up, low if block.q_lora else r.gather(k, "q.all_gather", f"{key}.norm"))
    kv = r.linear(k, kv_up, low)
    turned = Tensor((r.tokens, (heads + 1) * block.rope_dim), r.precision.compute)
    keys, joined = r.value(r.tokens, kv_up.outputs), r.value(r.tokens, heads * block.head_dim)
    out = k.vector("kv_join", "copy", [keys], [joined], after=[kv, q])
    if r.model.positions != "rope":
        k.name_port(f"{key}.qkv", out)
        return out
    return k.vector("rope", "rope", [turned], [turned], after=[out], port=f"{key}.qkv")


def _exchange(r: Rank, block: Attention | LatentAttention) -> Exchange | None:
    """How context ranks exchange tokens for heads, where they do."""
    if r.layout.cp == 1 or not r.layout.context_all_to_all:
        return None
    return Exchange(r, attention_shape(r, block), *heads_of(r, block))


def _all_keys(r: Rank, shape: AttentionShape) -> Tensor:
    """Keys and values of the whole sequence."""
    return r.value(r.tokens * r.layout.cp, shape.kv_heads * (shape.head_dim + shape.value_dim))


def _attended(r: Rank, k: Kernels, block: Attention | LatentAttention, key: str, qkv: Value) -> Value:
    """Fused attention to the whole sequence: the port ``core``."""
    shape, exchange = attention_shape(r, block), _exchange(r, block)
    if exchange:
        return exchange.core(k, key, exchange.exchanged(k, key, qkv))
    if r.layout.cp > 1 and r.layout.ring_attention:
        return ring_forward(r, k, shape, key, qkv)
    kv = qkv
    if r.layout.cp > 1:
        kind, whole = CollectiveKind.ALL_GATHER, _all_keys(r, shape)
        kv = k.collective("kv.all_gather", kind, r.groups.context, whole, after=[qkv])
    k.name_port(f"{key}.kv", kv)
    return k.attention("core", shape, r.precision.attention, after=[qkv, kv], port=f"{key}.core")


def core_again(r: Rank, k: Kernels, block: Attention | LatentAttention, key: str) -> None:
    """Fused attention once more, of keys that have been kept; in a ring they travel again."""
    shape, exchange = attention_shape(r, block), _exchange(r, block)
    if exchange:
        exchange.core(k, key, f"{key}.exchanged")
        return
    if r.layout.cp > 1 and r.layout.ring_attention:
        ring_forward(r, k, shape, key, f"{key}.qkv")
        return
    kept: list[Value] = [f"{key}.qkv", f"{key}.kv"]
    k.attention("core", shape, r.precision.attention, after=kept, port=f"{key}.core")


def exchange_again(r: Rank, k: Kernels, block: Attention | LatentAttention, key: str, qkv: Value) -> None:
    """Send tokens for heads once more where queries and keys have been made again."""
    exchange = _exchange(r, block)
    if exchange:
        exchange.exchanged(k, key, qkv)


def projection(r: Rank, block: Attention | LatentAttention) -> Linear:
    """The output projection of a rank's heads."""
    width = block.v_dim if isinstance(block, LatentAttention) else block.head_dim
    inputs = heads_of(r, block)[0] * width
    return Linear(name="proj", inputs=inputs, outputs=r.hidden, rows=r.tokens, adapter=r.adapter(block))


def forward_attention(r: Rank, k: Kernels, block: Attention | LatentAttention, key: str, x: Value) -> Value:
    """A block, from the residual stream to the residual stream."""
    normed = r.norm(k, "norm", x, f"{key}.norm")
    qkv = queries_and_keys(r, k, block, key, normed)
    out = _attended(r, k, block, key, qkv)
    return r.added(k, key, x, r.row(k, projection(r, block), out))


def backward_attention(
    r: Rank, k: Kernels, block: Attention | LatentAttention, key: str, grad: Value
) -> Value:
    """The gradient of what entered a block."""
    inner = r.added_backward(k, key, grad)
    inner = r.row_backward(k, projection(r, block), inner, f"{key}.core")
    back = _core_backward(r, k, block, key, inner)
    return _queries_backward(r, k, block, key, back, skip=grad)


def _core_backward(r: Rank, k: Kernels, block: Attention | LatentAttention, key: str, grad: Value) -> Value:
    """Gradients of queries, keys and values, those of keys on the context ranks that have them."""
    shape, exchange = attention_shape(r, block), _exchange(r, block)
    if exchange:
        return exchange.backward(k, key, grad)
    if r.layout.cp > 1 and r.layout.ring_attention:
        return ring_backward(r, k, shape, key, grad)
    reads: list[Value] = [grad, f"{key}.qkv", f"{key}.core"]
    if r.layout.cp == 1:
        return k.attention(
            "core.backward", shape, r.precision.attention, backward=True, after=[*reads, f"{key}.kv"]
        )
    groups, whole = r.groups.context, _all_keys(r, shape)
    again = k.collective(
        "kv.regather",
        CollectiveKind.ALL_GATHER,
        groups,
        whole,
        after=[f"{key}.qkv"],
        control=[grad] if not isinstance(grad, str) else [],
    )
    back = k.attention("core.backward", shape, r.precision.attention, backward=True, after=[*reads, again])
    return k.collective("kv.grad.reduce_scatter", CollectiveKind.REDUCE_SCATTER, groups, whole, after=[back])


def _queries_backward(
    r: Rank, k: Kernels, block: Attention | LatentAttention, key: str, grad: Value, *, skip: Value
) -> Value:
    heads, kv_heads = heads_of(r, block)
    if r.model.positions == "rope":
        width = (
            (heads + kv_heads) * block.head_dim
            if isinstance(block, Attention)
            else (heads + 1) * block.rope_dim
        )
        turned = r.value(r.tokens, width)
        grad = k.vector("rope.backward", "rope", [turned], [turned], after=[grad])
        if isinstance(block, Attention) and block.qk_norm:
            grad = k.vector(
                "qk_norm.backward",
                "rms_norm_backward",
                [turned, turned],
                [turned],
                after=[grad, f"{key}.qk_normed"],
            )
    if isinstance(block, Attention):
        back = r.column_backward(k, qkv_layer(r, block), grad, f"{key}.qkv_input")
    else:
        back = _latent_backward(r, k, block, key, grad)
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", skip)


def _latent_backward(r: Rank, k: Kernels, block: LatentAttention, key: str, grad: Value) -> Value:
    down, q_up, kv_up = latent_layers(r, block)
    latent: Value = f"{key}.latent"
    again = r.gather_columns(k, "latent.regather", latent, down.outputs) if r.learns(q_up) else None
    q = r.linear_backward(k, q_up, grad, latent if block.q_lora else f"{key}.norm", again)
    kv = r.linear_backward(k, kv_up, grad, latent, again)
    width = r.value(r.tokens, down.outputs)
    both: Value = k.vector("latent.add", "add", [width, width], [width], after=[q, kv])
    both = r.scatter_columns(k, "latent.grad", both, down.outputs)
    lora = r.value(r.rows, down.outputs)
    both = k.vector("latent_norm.backward", "rms_norm_backward", [lora, lora], [lora], after=[both, latent])
    return r.linear_backward(k, down, both, f"{key}.norm")
