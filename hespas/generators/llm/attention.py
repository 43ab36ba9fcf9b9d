"""Attention on one rank: grouped-query and latent attention, forward and backward.

There are three ways to share a sequence among context-parallel ranks: gather the keys and values of the whole
sequence and reduce their gradients, send keys around a ring, or exchange tokens for heads (all-to-all). With
a causal mask each rank has an early and a late piece of the sequence, so that all ranks have equal work.

Intermediate values have names, called ports, by which other passes read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hespas.generators.llm.kernels import AttentionShape, KernelWriter, TensorSpec, Value
from hespas.generators.llm.model import Attention, LatentAttention
from hespas.generators.llm.rank import LinearLayer, ModelRank
from hespas.graph import CollectiveKind

__all__ = [
    "ContextExchange",
    "attended_pairs",
    "attention_shape",
    "backward_attention",
    "backward_in_pieces",
    "context_buffers",
    "forward_attention",
    "forward_in_pieces",
    "heads_of",
    "latent_layers",
    "latent_up",
    "projection",
    "qkv_layer",
    "queries_and_keys",
    "recompute_core",
    "recompute_exchange",
    "unsaved_keys",
]


def _in_pieces(r: ModelRank) -> bool:
    """Return True if attention is computed to the keys of one context-parallel rank after the other. PyTorch
    (torchtitan) does so even if keys are gathered (``_templated_ring_attention`` of
    ``torch.distributed.tensor.experimental``).
    """
    layout = r.layout
    is_torch = r.training.style == "torchtitan" and not layout.context_all_to_all
    return layout.cp > 1 and (layout.ring_attention or is_torch)


def _piece(r: ModelRank, shape: AttentionShape) -> tuple[AttentionShape, TensorSpec, TensorSpec]:
    """Return the sizes of attention between the queries of a rank and the keys of one context-parallel rank,
    the tensor of these keys and values, and the tensor of all keys and values. torchtitan repeats keys and
    values for each query head before they are sent.
    """
    cp = r.layout.cp
    one = shape._replace(keys=shape.keys // cp, pairs=shape.pairs / cp)
    heads = shape.heads if r.training.style == "torchtitan" else shape.kv_heads
    columns = heads * (shape.head_dim + shape.value_dim)
    return one, r.value(r.tokens, columns), r.value(r.tokens * cp, columns)


def forward_in_pieces(r: ModelRank, k: KernelWriter, shape: AttentionShape, key: str, qkv: Value) -> Value:
    """Add attention to the keys of one context-parallel rank after the other, whose results are summed. Keys
    are sent around a ring, or are gathered before. The final result has the port ``core``. The keys that are
    received last have the port ``kv``.

    PyTorch sums the results in a separate kernel, in 32 bits. A compiled layer waits for the gathered keys
    before its first attention kernel.
    """
    one, keys, all_keys = _piece(r, shape)
    in_torch = r.training.style == "torchtitan"
    current, done = qkv, -1
    if not r.layout.ring_attention:
        kind = CollectiveKind.ALL_GATHER
        current = k.collective("kv.all_gather", kind, r.groups.context, all_keys, after=[qkv])
    out = r.value(r.tokens, shape.heads * shape.value_dim)
    total = TensorSpec(out.shape, "f32")
    for step in range(r.layout.cp):
        if step and r.layout.ring_attention:
            before = [] if r.training.overlap.context else [done]
            current = k.permute(f"kv.ring.{step}", r.groups.ring(), keys, after=[current], control=before)
        reads: list[Value] = [qkv, current, done] if step or r.training.compiled else [qkv]
        adds = step > 0 and not in_torch
        piece = k.attention(f"core.{step}", one, r.precision.attention, adds=adds, after=reads)
        if in_torch and step:
            piece = k.vector(f"core.add.{step}", "add", [out, total], [total], after=[done, piece])
        done = piece
    if in_torch:
        done = k.vector("core.cast", "copy", [total], [out], after=[done])
    k.name_port(f"{key}.kv", current)
    k.name_port(f"{key}.core", done)
    return done


def backward_in_pieces(r: ModelRank, k: KernelWriter, shape: AttentionShape, key: str, grad: Value) -> Value:
    """Add the backward pass of :func:`forward_in_pieces`: the gradients of queries, keys and values.
    Gradients of keys are sent around the ring.

    PyTorch sums gradients in a separate kernel, in 32 bits, and sends them in 32 bits.
    """
    one, keys, all_keys = _piece(r, shape)
    in_torch = r.training.style == "torchtitan"
    waits = not r.training.overlap.context or (in_torch and r.training.compiled)
    current: Value = f"{key}.kv"
    backward_ring = r.groups.ring(-1)
    done, summed = -1, -1
    narrow = r.value(r.tokens, shape.heads * shape.head_dim), keys
    wide = tuple(TensorSpec(tensor.shape, "f32") for tensor in narrow)
    if not r.layout.ring_attention:
        kind, control = CollectiveKind.ALL_GATHER, [] if isinstance(grad, str) else [grad]
        current = k.collective(
            "kv.regather", kind, r.groups.context, all_keys, after=[f"{key}.qkv"], control=control
        )
    for step in range(r.layout.cp):
        received = -1
        if step:
            before = [] if r.training.overlap.context else [done]
            if r.layout.ring_attention:
                current = k.permute(
                    f"kv.ring.backward.{step}", backward_ring, keys, after=[current], control=before
                )
            sent = wide[1] if in_torch else keys
            received = k.permute(f"kv.grad.ring.{step}", backward_ring, sent, after=[summed])
            k.follow += [received] if waits else []
        reads: list[Value] = [grad, f"{key}.qkv", f"{key}.core", current]
        reads += [] if in_torch else [done]
        name, adds = f"core.backward.{step}", step > 0 and not in_torch
        done = k.attention(name, one, r.precision.attention, backward=True, adds=adds, after=reads)
        if in_torch:
            both = [*narrow, *wide]
            summed = k.vector(f"qkv.grad.add.{step}", "add", both, wide, after=[done, received, summed])
        elif step:
            summed = k.vector(f"kv.grad.add.{step}", "add", [keys, keys], [keys], after=[done, received])
        else:
            summed = done
    if in_torch:
        returned = k.permute("kv.grad.ring.last", backward_ring, wide[1], after=[summed])
        summed = k.vector("qkv.grad.cast", "copy", wide, narrow, after=[summed, returned])
    return summed


@dataclass(frozen=True, slots=True)
class ContextExchange:
    """All-to-all between context-parallel ranks before and after attention. A rank sends its tokens of most
    heads and receives all tokens of a few heads. ``heads`` and ``kv_heads`` are the numbers of heads of a
    rank before the exchange; ``shape`` has the sizes of attention after it.
    """

    rank: ModelRank
    shape: AttentionShape
    heads: int
    kv_heads: int

    @property
    def _sent_heads(self) -> int:
        """Return the number of key heads that a rank sends. A head that several ranks need is counted once
        for each of them.
        """
        return max(self.kv_heads, self.rank.layout.cp)

    @property
    def sent(self) -> TensorSpec:
        """Return the tensor of the queries, keys and values that a rank sends."""
        shape = self.shape
        columns = self.heads * shape.head_dim + self._sent_heads * (shape.head_dim + shape.value_dim)
        return self.rank.value(self.rank.tokens, columns)

    def _all_to_all(self, k: KernelWriter, name: str, whole: TensorSpec, x: Value, port: str = "") -> Value:
        groups = self.rank.groups.context
        return k.collective(name, CollectiveKind.ALL_TO_ALL, groups, whole, after=[x], port=port)

    def exchange(self, k: KernelWriter, key: str, qkv: Value) -> Value:
        """Add the exchange after which a rank has the queries, keys and values of all tokens. The result has
        the port ``exchanged``.
        """
        return self._all_to_all(k, "qkv.all_to_all", self.sent, qkv, f"{key}.exchanged")

    def core(self, k: KernelWriter, key: str, qkv: Value) -> Value:
        """Add attention (port ``inner``), and the exchange that returns its results to the ranks of their
        tokens (port ``core``).
        """
        inner = k.attention(
            "core", self.shape, self.rank.precision.attention, after=[qkv], port=f"{key}.inner"
        )
        results = self.rank.value(self.rank.tokens, self.heads * self.shape.value_dim)
        return self._all_to_all(k, "core.all_to_all", results, inner, f"{key}.core")

    def backward(self, k: KernelWriter, key: str, grad: Value) -> Value:
        """Add the gradients of queries, keys and values of this rank's tokens."""
        shape, r = self.shape, self.rank
        results = r.value(r.tokens, self.heads * shape.value_dim)
        grad = self._all_to_all(k, "core.grad.all_to_all", results, grad)
        reads: list[Value] = [grad, f"{key}.exchanged", f"{key}.inner"]
        inner = k.attention("core.backward", shape, r.precision.attention, backward=True, after=reads)
        back = self._all_to_all(k, "qkv.grad.all_to_all", self.sent, inner)
        if self._sent_heads == self.kv_heads:
            return back
        width = shape.head_dim + shape.value_dim
        repeated, own = r.value(r.tokens, self._sent_heads * width), r.value(r.tokens, self.kv_heads * width)
        return k.vector("kv.grad.add", "add", [repeated], [own], after=[back])


def heads_of(r: ModelRank, block: Attention | LatentAttention) -> tuple[int, int]:
    """Return the numbers of query heads and key heads on a rank. Key heads are replicated if there are fewer
    of them than ranks.
    """
    kv = block.kv_heads if isinstance(block, Attention) else block.heads
    return block.heads // r.layout.tp, max(1, kv // r.layout.tp)


def attention_shape(r: ModelRank, block: Attention | LatentAttention) -> AttentionShape:
    """Return the sizes of attention on a rank.

    Each context-parallel rank has an early and a late piece of each sequence, so that all ranks have equal
    work under the causal mask. With the all-to-all exchange, a rank has whole sequences for some heads.
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
    """Return the number of unmasked pairs of query and key in a sequence of length s.

    It is s (s + 1) / 2 with a causal mask, and w s - w (w - 1) / 2 with a sliding window of w keys, which
    includes the query's position. Without a causal mask it is s s, and (2 w + 1) s with a window. With chunks
    it is the sum over all chunks.
    """
    if chunk and chunk < seq:
        whole, rest = divmod(seq, chunk)
        return whole * attended_pairs(chunk, causal=causal) + attended_pairs(rest, causal=causal)
    if not causal:
        return float(seq) * (min(2 * window + 1, seq) if window else seq)
    reach = min(window or seq, seq)
    return reach * (reach + 1) / 2 + (seq - reach) * reach


def qkv_layer(r: ModelRank, block: Attention) -> LinearLayer:
    """Return the projection to a rank's queries, keys and values."""
    heads, kv_heads = heads_of(r, block)
    return LinearLayer(
        name="qkv",
        inputs=r.hidden,
        outputs=block.head_dim * (heads + 2 * kv_heads),
        rows=r.tokens,
        adapter=r.adapter(block),
    )


def latent_layers(r: ModelRank, block: LatentAttention) -> tuple[LinearLayer, ...]:
    """Return the linear layers of latent attention: the down-projection, and the up-projections of queries
    and of keys and values. The matrix of the down-projection is replicated on every tensor-parallel rank.
    """
    heads, adapter = block.heads // r.layout.tp, r.adapter(block)
    low, keys = block.q_lora + block.kv_lora + block.rope_dim, heads * (block.nope_dim + block.v_dim)
    down = LinearLayer(name="qkv_down", inputs=r.hidden, outputs=low, rows=r.rows, adapter=adapter)
    q_up = LinearLayer(
        name="q_up",
        inputs=block.q_lora or r.hidden,
        outputs=heads * block.head_dim,
        rows=r.tokens,
        adapter=adapter,
    )
    kv_up = LinearLayer(name="kv_up", inputs=block.kv_lora, outputs=keys, rows=r.tokens, adapter=adapter)
    return down, q_up, kv_up


def queries_and_keys(
    r: ModelRank, k: KernelWriter, block: Attention | LatentAttention, key: str, norm: Value
) -> Value:
    """Add the projections to queries, keys and values, with position embeddings. The result has the port
    ``qkv``.
    """
    heads, kv_heads = heads_of(r, block)
    if isinstance(block, Attention):
        out = r.column(k, qkv_layer(r, block), norm, f"{key}.qkv_input")
        turned = TensorSpec((r.tokens, (heads + kv_heads) * block.head_dim), r.precision.compute)
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


def latent_up(r: ModelRank, k: KernelWriter, block: LatentAttention, key: str, low: Value) -> Value:
    """Add the up-projections from the latents ``low`` to queries, keys and values, with position embeddings.
    The result has the port ``qkv``.
    """
    heads = heads_of(r, block)[0]
    down, q_up, kv_up = latent_layers(r, block)
    low = r.gather_columns(k, "latent.all_gather", low, down.outputs)
    q = r.linear(k, q_up, low if block.q_lora else r.gather(k, "q.all_gather", f"{key}.norm"))
    kv = r.linear(k, kv_up, low)
    turned = TensorSpec((r.tokens, (heads + 1) * block.rope_dim), r.precision.compute)
    keys, joined = r.value(r.tokens, kv_up.outputs), r.value(r.tokens, heads * block.head_dim)
    out = k.vector("kv_join", "copy", [keys], [joined], after=[kv, q])
    if r.model.positions != "rope":
        k.name_port(f"{key}.qkv", out)
        return out
    return k.vector("rope", "rope", [turned], [turned], after=[out], port=f"{key}.qkv")


def _exchange(r: ModelRank, block: Attention | LatentAttention) -> ContextExchange | None:
    """Return the all-to-all exchange between context-parallel ranks; None if the layout does not use it."""
    if r.layout.cp == 1 or not r.layout.context_all_to_all:
        return None
    return ContextExchange(r, attention_shape(r, block), *heads_of(r, block))


def _all_keys(r: ModelRank, shape: AttentionShape) -> TensorSpec:
    """Return the tensor of keys and values of the whole sequence."""
    return r.value(r.tokens * r.layout.cp, shape.kv_heads * (shape.head_dim + shape.value_dim))


def context_buffers(
    r: ModelRank, block: Attention | LatentAttention
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the tensors that context-parallel ranks need for attention in the forward pass and in the
    backward pass, in addition to the queries, keys, values and results of their own tokens and the gradients
    of these.

    Keys and values are gathered for the whole sequence. In a ring, a rank has the keys and values in use, and
    receives the next ones. The exchange of tokens for heads has a result of the size of its operand.
    The backward pass adds gradients of keys and values: of the whole sequence if they are reduced afterwards,
    and received ones otherwise. PyTorch has the keys that it sends in one tensor, and sums in 32 bits:
    results in the forward pass; gradients of queries, and the summed, sent and received gradients of keys in
    the backward pass.
    """
    if r.layout.cp == 1:
        return [], []
    shape, exchange = attention_shape(r, block), _exchange(r, block)
    if exchange:
        return [exchange.sent], [exchange.sent]
    if not _in_pieces(r):
        whole = _all_keys(r, shape)
        return [whole], [whole, whole]
    _, piece, all_keys = _piece(r, shape)
    keys = [piece] * min(r.layout.cp - 1, 2) if r.layout.ring_attention else [all_keys]
    if r.training.style != "torchtitan":
        return keys, [*keys, piece]
    result = TensorSpec((r.tokens, shape.heads * shape.value_dim), "f32")
    queries = TensorSpec((r.tokens, shape.heads * shape.head_dim), "f32")
    gradients = TensorSpec(piece.shape, "f32")
    return [piece, *keys, result, result], [piece, *keys, piece, queries, *[gradients] * 3]


def recompute_core(r: ModelRank, k: KernelWriter, block: Attention | LatentAttention, key: str) -> None:
    """Add the recomputation of fused attention from saved keys. With ring attention the keys are sent around
    the ring again.
    """
    shape, exchange = attention_shape(r, block), _exchange(r, block)
    if exchange:
        exchange.core(k, key, f"{key}.exchanged")
        return
    if _in_pieces(r):
        forward_in_pieces(r, k, shape, key, f"{key}.qkv")
        return
    saved: list[Value] = [f"{key}.qkv", f"{key}.kv"]
    k.attention("core", shape, r.precision.attention, after=saved, port=f"{key}.core")


def recompute_exchange(
    r: ModelRank, k: KernelWriter, block: Attention | LatentAttention, key: str, qkv: Value
) -> None:
    """Add the exchange of tokens for heads again, after the recomputation of queries and keys."""
    exchange = _exchange(r, block)
    if exchange:
        exchange.exchange(k, key, qkv)


def unsaved_keys(r: ModelRank, k: KernelWriter, block: Attention, key: str) -> Value:
    """Add the recomputation of the matmuls whose results selective checkpointing per operation does not save:
    the keys, and the output projection unless its sum over tensor-parallel ranks is saved. Return the
    queries, keys and values, of which position embeddings are recomputed too. They have the port ``qkv``.
    """
    heads, kv_heads = heads_of(r, block)
    keys = replace(qkv_layer(r, block), name="k", outputs=kv_heads * block.head_dim)
    out = r.column(k, keys, f"{key}.norm", f"{key}.qkv_input")
    if r.layout.tp == 1:
        r.linear(k, projection(r, block), f"{key}.core")
    if r.model.positions != "rope":
        k.name_port(f"{key}.qkv", out)
        return out
    turned = TensorSpec((r.tokens, (heads + kv_heads) * block.head_dim), r.precision.compute)
    return k.vector("rope", "rope", [turned], [turned], after=[out], port=f"{key}.qkv")


def projection(r: ModelRank, block: Attention | LatentAttention) -> LinearLayer:
    """Return the output projection of the heads on a rank."""
    width = block.v_dim if isinstance(block, LatentAttention) else block.head_dim
    inputs = heads_of(r, block)[0] * width
    return LinearLayer(name="proj", inputs=inputs, outputs=r.hidden, rows=r.tokens, adapter=r.adapter(block))


def forward_attention(
    r: ModelRank, k: KernelWriter, block: Attention | LatentAttention, key: str, x: Value
) -> Value:
    """Add an attention block; ``x`` and the result are the residual stream before and after it."""
    normed = r.norm(k, "norm", x, f"{key}.norm")
    qkv = queries_and_keys(r, k, block, key, normed)
    shape, exchange = attention_shape(r, block), _exchange(r, block)
    if exchange:
        out = exchange.core(k, key, exchange.exchange(k, key, qkv))
    elif _in_pieces(r):
        out = forward_in_pieces(r, k, shape, key, qkv)
    else:
        kv = qkv
        if r.layout.cp > 1:
            kind, whole = CollectiveKind.ALL_GATHER, _all_keys(r, shape)
            kv = k.collective("kv.all_gather", kind, r.groups.context, whole, after=[qkv])
        k.name_port(f"{key}.kv", kv)
        out = k.attention("core", shape, r.precision.attention, after=[qkv, kv], port=f"{key}.core")
    return r.add_block(k, key, x, r.row(k, projection(r, block), out))


def backward_attention(
    r: ModelRank, k: KernelWriter, block: Attention | LatentAttention, key: str, grad: Value
) -> Value:
    """Add the backward pass of an attention block, and return the gradient of its input."""
    inner = r.add_block_backward(k, key, grad)
    inner = r.row_backward(k, projection(r, block), inner, f"{key}.core")
    back = _core_backward(r, k, block, key, inner)
    return _queries_backward(r, k, block, key, back, skip=grad)


def _core_backward(
    r: ModelRank, k: KernelWriter, block: Attention | LatentAttention, key: str, grad: Value
) -> Value:
    """Add the backward pass of attention: the gradients of queries, keys and values. Gradients of keys are
    sent to the context-parallel ranks that own the keys.
    """
    shape, exchange = attention_shape(r, block), _exchange(r, block)
    if exchange:
        return exchange.backward(k, key, grad)
    if _in_pieces(r):
        return backward_in_pieces(r, k, shape, key, grad)
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
    r: ModelRank, k: KernelWriter, block: Attention | LatentAttention, key: str, grad: Value, *, skip: Value
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
        down, q_up, kv_up = latent_layers(r, block)
        latent: Value = f"{key}.latent"
        again = r.gather_columns(k, "latent.regather", latent, down.outputs) if r.learns(q_up) else None
        q = r.linear_backward(k, q_up, grad, latent if block.q_lora else f"{key}.norm", again)
        kv = r.linear_backward(k, kv_up, grad, latent, again)
        latents = r.value(r.tokens, down.outputs)
        back = k.vector("latent.add", "add", [latents, latents], [latents], after=[q, kv])
        back = r.scatter_columns(k, "latent.grad", back, down.outputs)
        lora = r.value(r.rows, down.outputs)
        back = k.vector(
            "latent_norm.backward", "rms_norm_backward", [lora, lora], [lora], after=[back, latent]
        )
        back = r.linear_backward(k, down, back, f"{key}.norm")
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", skip)
