"""Attention over context ranks that share a sequence: keys and values round a ring, or tokens for heads.

In a ring (arXiv 2310.01889) each rank attends to the keys it has while it passes them on, and takes those of
the rank before it next: as many pieces as there are ranks. Backward keys go the other way, from where they
stopped, and their gradients after them, so that all end where they belong. With a causal mask each rank has
an early and a late part of the sequence, and every piece the same work but for half a diagonal.

Exchanged (arXiv 2309.14509), each rank has all tokens of some heads during attention. Heads of keys that are
fewer than ranks are sent to several, and their gradients summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hespas.generators.llm.kernels import AttentionShape, Kernels, Tensor, Value
from hespas.generators.llm.rank import Rank
from hespas.graph import CollectiveKind

__all__ = ["Exchange", "ring_backward", "ring_forward"]


def _piece(r: Rank, shape: AttentionShape) -> tuple[AttentionShape, Tensor]:
    """Attention to the keys of one rank, and these keys and values."""
    cp = r.layout.cp
    one = shape._replace(keys=shape.keys // cp, pairs=shape.pairs / cp)
    return one, r.value(r.tokens, shape.kv_heads * (shape.head_dim + shape.value_dim))


def ring_forward(r: Rank, k: Kernels, shape: AttentionShape, key: str, qkv: Value) -> Value:
    """Attention in pieces that add up: the port ``core``; the keys that came last are the port ``kv``."""
    one, keys = _piece(r, shape)
    held, done = qkv, -1
    for step in range(r.layout.cp):
        if step:
            before = [] if r.training.overlap.context else [done]
            held = k.permute(f"kv.ring.{step}", r.groups.ring(), keys, after=[held], control=before)
        done = k.attention(f"core.{step}", one, r.precision.attention, adds=step > 0, after=[qkv, held, done])
    k.name_port(f"{key}.kv", held)
    k.name_port(f"{key}.core", done)
    return done


def ring_backward(r: Rank, k: Kernels, shape: AttentionShape, key: str, grad: Value) -> Value:
    """Gradients of queries, keys and values."""
    one, keys = _piece(r, shape)
    held: Value = f"{key}.kv"
    done, summed = -1, -1
    for step in range(r.layout.cp):
        moved = -1
        if step:
            before = [] if r.training.overlap.context else [done]
            back = r.groups.ring(-1)
            held = k.permute(f"kv.ring.backward.{step}", back, keys, after=[held], control=before)
            moved = k.permute(f"kv.grad.ring.{step}", back, keys, after=[summed])
            k.follow += [] if r.training.overlap.context else [moved]
        reads: list[Value] = [grad, f"{key}.qkv", f"{key}.core", held, done]
        name = f"core.backward.{step}"
        done = k.attention(name, one, r.precision.attention, backward=True, adds=step > 0, after=reads)
        summed = done
        if step:
            summed = k.vector(f"kv.grad.add.{step}", "add", [keys, keys], [keys], after=[done, moved])
    return summed


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tokens for heads: ``heads`` and ``kv_heads`` of a rank before it, ``shape`` of attention after it."""

    rank: Rank
    shape: AttentionShape
    heads: int
    kv_heads: int

    @property
    def _sent(self) -> int:
        """Heads of keys that are sent: those that go to several ranks as often."""
        return max(self.kv_heads, self.rank.layout.cp)

    @property
    def _columns(self) -> int:
        """Columns of queries, keys and values that are sent."""
        shape = self.shape
        return self.heads * shape.head_dim + self._sent * (shape.head_dim + shape.value_dim)

    def _all_to_all(self, k: Kernels, name: str, columns: int, x: Value, port: str = "") -> Value:
        whole = self.rank.value(self.rank.tokens, columns)
        groups = self.rank.groups.context
        return k.collective(name, CollectiveKind.ALL_TO_ALL, groups, whole, after=[x], port=port)

    def exchanged(self, k: Kernels, key: str, qkv: Value) -> Value:
        """Queries, keys and values of all tokens: the port ``exchanged``."""
        return self._all_to_all(k, "qkv.all_to_all", self._columns, qkv, f"{key}.exchanged")

    def core(self, k: Kernels, key: str, qkv: Value) -> Value:
        """Attention, kept as the port ``inner``, and its results of this rank's tokens: ``core``."""
        inner = k.attention(
            "core", self.shape, self.rank.precision.attention, after=[qkv], port=f"{key}.inner"
        )
        columns = self.heads * self.shape.value_dim
        return self._all_to_all(k, "core.all_to_all", columns, inner, f"{key}.core")

    def backward(self, k: Kernels, key: str, grad: Value) -> Value:
        """Gradients of queries, keys and values of this rank's tokens."""
        shape, r = self.shape, self.rank
        grad = self._all_to_all(k, "core.grad.all_to_all", self.heads * shape.value_dim, grad)
        reads: list[Value] = [grad, f"{key}.exchanged", f"{key}.inner"]
        inner = k.attention("core.backward", shape, r.precision.attention, backward=True, after=reads)
        back = self._all_to_all(k, "qkv.grad.all_to_all", self._columns, inner)
        if self._sent == self.kv_heads:
            return back
        width = shape.head_dim + shape.value_dim
        repeated, own = r.value(r.tokens, self._sent * width), r.value(r.tokens, self.kv_heads * width)
        return k.vector("kv.grad.add", "add", [repeated], [own], after=[back])
