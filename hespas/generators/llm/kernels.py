"""The kernels of a pass: nodes with their tensors, costs and dependencies.

A matrix product M x K by K x N costs 2 M K N FLOPs and moves its operands and its result once; one that adds
to its result reads that too. Attention moves queries, keys, values and results only (arXiv 2205.14135), 2 x
(head + value head) FLOPs a pair of query and key, 2.5 times that backward, with the scores computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hespas.generators.llm.assemble import Need, Part
from hespas.generators.spec import REDUCES, cuts_of
from hespas.graph import CollectiveKind, NodeKind, OpClass, Permutation
from hespas.graph.builder import GraphBuilder
from hespas.graph.columns import DType, dtype
from hespas.graph.errors import InvariantError
from hespas.graph.groups import GroupSet
from hespas.graph.opgraph import FULL_F32_PRODUCTS

__all__ = ["AttentionShape", "Kernels", "Tensor", "Value"]

_ACCUMULATOR = "f32"
_MESSAGES, _RING, _FIRST_QUEUE = 0, 1, 2
"""Streams of messages between stages, of those round a ring, and of the first communicator."""


Value = int | str
"""A node of this part (-1: none), or a port: of the forward pass, or ``backward:port`` of another."""


class Tensor(NamedTuple):
    """Shape and element type of a value."""

    shape: tuple[int, ...]
    dtype: str


class AttentionShape(NamedTuple):
    """Sizes of attention on a rank; ``pairs`` of query and key that are not masked, of one sequence."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    pairs: float


class _Vector(NamedTuple):
    """How an elementwise kernel is called, its class, and FLOPs and transcendentals of an element."""

    op: str
    op_class: OpClass
    flops: float
    transcendentals: float = 0.0


_VECTORS: Mapping[str, _Vector] = {
    "add": _Vector("aten::add", OpClass.ELEMENTWISE, 1.0),
    "mul": _Vector("aten::mul", OpClass.ELEMENTWISE, 1.0),
    "add_rms_norm": _Vector("fused_add_rms_norm", OpClass.NORMALIZATION, 5.0),
    "add_layer_norm": _Vector("fused_add_layer_norm", OpClass.NORMALIZATION, 9.0),
    "rms_norm": _Vector("aten::_fused_rms_norm", OpClass.NORMALIZATION, 4.0),
    "rms_norm_backward": _Vector("aten::_fused_rms_norm_backward", OpClass.NORMALIZATION, 8.0),
    "layer_norm": _Vector("aten::native_layer_norm", OpClass.NORMALIZATION, 8.0),
    "layer_norm_backward": _Vector("aten::native_layer_norm_backward", OpClass.NORMALIZATION, 12.0),
    "rope": _Vector("rotary_embedding", OpClass.ELEMENTWISE, 3.0),
    "silu": _Vector("silu_and_mul", OpClass.TRANSCENDENTAL, 4.0, 1.0),
    "gelu": _Vector("gelu", OpClass.TRANSCENDENTAL, 8.0, 1.0),
    "relu2": _Vector("squared_relu", OpClass.ELEMENTWISE, 2.0),
    "softmax": _Vector("aten::_softmax", OpClass.NORMALIZATION, 4.0, 1.0),
    "topk": _Vector("aten::topk", OpClass.SORT, 1.0),
    "cross_entropy": _Vector("cross_entropy", OpClass.NORMALIZATION, 4.0, 1.0),
    "cast": _Vector("aten::_to_copy", OpClass.ELEMENTWISE, 0.0),
    "quantize": _Vector("quantize", OpClass.QUANTIZE, 2.0),
    "absmax": _Vector("absmax", OpClass.REDUCTION, 2.0),
    "permute": _Vector("moe_permute", OpClass.GATHER, 0.0),
    "unpermute": _Vector("moe_unpermute", OpClass.SCATTER, 2.0),
    "embedding": _Vector("aten::embedding", OpClass.GATHER, 0.0),
    "embedding_backward": _Vector("aten::embedding_dense_backward", OpClass.SCATTER, 1.0),
    "adam": _Vector("aten::_fused_adamw_", OpClass.ELEMENTWISE, 12.0, 1.0),
    "norm": _Vector("aten::norm", OpClass.REDUCTION, 2.0),
    "conv1d": _Vector("causal_conv1d", OpClass.ELEMENTWISE, 8.0, 1.0),
    "decay": _Vector("segment_sum_exp", OpClass.TRANSCENDENTAL, 2.0, 1.0),
    "copy": _Vector("aten::copy_", OpClass.MOVE, 0.0),
    "cat": _Vector("aten::cat", OpClass.MOVE, 0.0),
    "sum": _Vector("aten::sum", OpClass.REDUCTION, 1.0),
}
"""Kernels by what they do. Names are those of PyTorch and of the libraries that fuse them."""


@dataclass(slots=True)
class Kernels:
    """Adds the nodes of one part to a template. ``module`` is where in the model the next nodes stand, and
    ``follow`` what the next node that computes waits for. While ``again`` is set, ports are those of a
    forward pass that is computed again: ``local`` keeps them, so that what uses them does not reach back.
    ``made`` are gradients of weights since it was last emptied. ``queues``: each communicator has a stream of
    its own, as those of NCCL, and what is sent to another stage has one. ``tf32``: products of f32 run on
    TF32 units, else they are IEEE f32. ``pending`` are results that are yet to be added to the residual
    stream, ``sums`` the nodes that did it.
    """

    builder: GraphBuilder
    part: Part
    module: str = ""
    again: bool = False
    local: dict[str, int] = field(default_factory=dict[str, int])
    follow: list[int] = field(default_factory=list[int])
    made: list[int] = field(default_factory=list[int])
    queues: bool = False
    tf32: bool = False
    pending: dict[Value, Value] = field(default_factory=dict["Value", "Value"])
    sums: dict[Value, Value] = field(default_factory=dict["Value", "Value"])
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _dtypes: dict[str, DType] = field(default_factory=dict[str, DType])

    def bytes_of(self, tensor: Tensor) -> float:
        """Storage of a tensor."""
        return self.builder.types.bytes_of(self._row(tensor))

    def _row(self, tensor: Tensor) -> int:
        return self.builder.types.add(self._type(tensor.dtype), tensor.shape)

    def _type(self, name: str) -> DType:
        found = self._dtypes.get(name)
        if found is None:
            found = self._dtypes[name] = dtype(name)
        return found

    def node(
        self,
        name: str,
        op: str,
        op_class: OpClass,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        kind: NodeKind = NodeKind.COMPUTE,
        flops: float = 0.0,
        transcendentals: float = 0.0,
        bytes_read: float | None = None,
        bytes_written: float | None = None,
        in_place: bool = False,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
    ) -> int:
        """A node that waits for the values ``after`` and follows ``control``; others find it as ``port``.
        What it writes ``in_place``, into weights, gradients or states, is no new value.
        """
        builder = self.builder
        operands = [self._row(each) for each in reads]
        results = [self._row(each) for each in writes]
        sizes = builder.types.bytes_of
        data, ports = self._resolved(after)
        full = f"{self.module}.{name}" if self.module else name
        node = builder.add_node(
            name_row=builder.strings.add(full),
            op_row=builder.strings.add(op),
            op_class=op_class,
            kind=kind,
            data_deps=list(dict.fromkeys(data)),
            control_deps=list(dict.fromkeys(each for each in (*control, *self._followed(kind)) if each >= 0)),
            operands=operands,
            results=() if in_place else results,
            flops=flops,
            transcendentals=transcendentals,
            bytes_read=sum(map(sizes, operands)) if bytes_read is None else bytes_read,
            bytes_written=sum(map(sizes, results)) if bytes_written is None else bytes_written,
        )
        builder.set(node, framework_row=builder.strings.add(f"{self.part.kind}/{full.replace('.', '/')}"))
        part = self.part
        part.needs += [_need(node, part.chunk, pass_, each) for pass_, each in ports]
        self.name_port(port, node)
        if kind is NodeKind.COMPUTE:
            part.head = node if part.head < 0 else part.head
            part.tail = node
        return node

    def _followed(self, kind: NodeKind) -> list[int]:
        """What the next node that computes has to follow."""
        if kind is not NodeKind.COMPUTE:
            return []
        followed, self.follow = self.follow, []
        return followed

    def first_compute(self, start: int) -> int:
        """The first node from ``start`` on that computes."""
        return self.builder.first_of_kind(NodeKind.COMPUTE, start)

    def count(self, what: str) -> int:
        """How often this was asked before."""
        found = self._counts.get(what, 0)
        self._counts[what] = found + 1
        return found

    def name_port(self, port: str, value: Value) -> None:
        """Let others find a value under a name; values of other passes have theirs."""
        if isinstance(value, str):
            value = self.local.get(value, -1)
        if port and value >= 0:
            (self.local if self.again else self.part.ports)[port] = value

    def named(self, value: Value, port: str) -> str:
        """The name by which another pass finds a value."""
        if isinstance(value, str):
            if value not in self.local:
                return value
            value = self.local[value]
        self.part.ports[port] = value
        return f"{self.part.kind}:{port}"

    def _resolved(self, values: Sequence[Value]) -> tuple[list[int], list[tuple[str, str]]]:
        """Nodes of this part, and the passes and ports of values that others make."""
        nodes: list[int] = []
        ports: list[tuple[str, str]] = []
        for each in values:
            if not isinstance(each, str):
                nodes += [each] if each >= 0 else []
                continue
            pass_, _, port = each.rpartition(":")
            own = self.local.get(each, self.part.ports.get(port, -1) if pass_ == self.part.kind else -1)
            if own >= 0:
                nodes.append(own)
            else:
                ports.append((pass_ or "forward", port))
        return nodes, ports

    def product(
        self,
        name: str,
        sizes: tuple[int, int, int],
        *,
        left: str,
        right: str = "",
        result: str,
        batch: int = 1,
        accumulate: bool = False,
        in_place: bool = False,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
    ) -> int:
        """``batch`` products of ``(m, n, k)``: M x K by K x N. ``accumulate`` adds to what is there."""
        m, n, k = sizes
        lead = (batch,) if batch > 1 else ()
        right = right or left
        reads = [Tensor((*lead, m, k), left), Tensor((*lead, k, n), right)]
        writes = [Tensor((*lead, m, n), result)]
        flops = 2.0 * batch * m * n * k
        node = self.node(
            name,
            "aten::bmm" if batch > 1 else "aten::mm",
            OpClass.CONTRACTION,
            reads + (writes if accumulate else []),
            writes,
            flops=flops,
            in_place=in_place,
            after=after,
            control=control,
            port=port,
        )
        self._multiplies(node, (batch, m, n, k), (left, right), (flops, flops))
        return node

    def _multiplies(
        self,
        node: int,
        extents: tuple[int, int, int, int],
        types: tuple[str, str],
        flops: tuple[float, float],
    ) -> None:
        """State that a node multiplies matrices; ``flops`` are all and the useful ones."""
        lhs, rhs, accumulator = (self._type(each).code for each in (*types, _ACCUMULATOR))
        batch, m, n, k = extents
        self.builder.add_contraction(
            node, batch=batch, m=m, n=n, k=k, flops=flops[0], useful_flops=flops[1],
            lhs=lhs, rhs=rhs, accumulator=accumulator, products=self._products(types),
        )  # fmt: skip

    def _products(self, types: tuple[str, str]) -> int:
        """Return the narrow products that one multiplication is worth: IEEE f32 runs on no TF32 units."""
        return FULL_F32_PRODUCTS if types == ("f32", "f32") and not self.tf32 else 1

    def vector(
        self,
        name: str,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
        scale: float = 1.0,
        in_place: bool = False,
    ) -> int:
        """An elementwise, row by row or indexing kernel; FLOPs are counted on its largest tensor, ``scale``
        times. One that picks rows (embedding) reads only what it picks.
        """
        how = _VECTORS[what]
        elements = scale * max(_elements(each) for each in (*reads[:1], *writes[:1]))
        picks = how.op_class is OpClass.GATHER
        return self.node(
            name,
            how.op,
            how.op_class,
            reads,
            writes,
            flops=how.flops * elements,
            transcendentals=how.transcendentals * elements,
            bytes_read=sum(map(self.bytes_of, writes)) if picks else None,
            in_place=in_place,
            after=after,
            control=control,
            port=port,
        )

    def attention(
        self,
        name: str,
        shape: AttentionShape,
        element: str,
        *,
        cache: str = "",
        backward: bool = False,
        adds: bool = False,
        after: Sequence[Value] = (),
        port: str = "",
    ) -> int:
        """Fused attention; backward it computes the scores again and makes three gradients. ``cache`` is the
        element type of keys and values where it is not that of queries. ``adds``: to the results, or to the
        gradient of queries, of attention to other keys, which it reads.
        """
        q = Tensor((shape.batch, shape.heads, shape.queries, shape.head_dim), element)
        k = Tensor((shape.batch, shape.kv_heads, shape.keys, shape.head_dim), cache or element)
        v = Tensor((shape.batch, shape.kv_heads, shape.keys, shape.value_dim), cache or element)
        out = Tensor((shape.batch, shape.heads, shape.queries, shape.value_dim), element)
        sums = Tensor((shape.batch, shape.heads, shape.queries), "f32")
        dims = 2.0 * shape.batch * shape.heads * (shape.head_dim + shape.value_dim)
        if backward:
            # scores again and the gradients of queries and keys over the head, two more over the value head
            dims = 2.0 * shape.batch * shape.heads * (3 * shape.head_dim + 2 * shape.value_dim)
        suffix = "_backward" if backward else ""
        whole = float(shape.queries) * shape.keys
        before = ([q] if backward else [out, sums]) if adds else []
        node = self.node(
            name,
            f"aten::_scaled_dot_product_flash_attention{suffix}",
            OpClass.ATTENTION,
            ([q, k, v, out, out, sums] if backward else [q, k, v]) + before,
            [q, k, v] if backward else [out, sums],
            flops=dims * whole,
            transcendentals=float(shape.batch * shape.heads) * shape.pairs,
            after=after,
            port=port,
        )
        self.builder.set(node, useful_flops=dims * shape.pairs)
        if self._products((element, cache or element)) > 1:
            heads = shape.batch * shape.heads
            sizes = (heads, shape.queries, shape.keys, round(dims / 2 / heads))
            self._multiplies(node, sizes, (element, element), (dims * whole, dims * shape.pairs))
        return node

    def transfer(
        self,
        name: str,
        tensor: Tensor,
        *,
        stores: bool,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
        in_place: bool = False,
    ) -> int:
        """A copy to the memory of the host, or back. Its bytes are those that cross the link, once."""
        size = self.bytes_of(tensor)
        return self.node(
            name,
            "aten::copy_",
            OpClass.HOST,
            [tensor],
            [tensor],
            kind=NodeKind.MEM_STORE if stores else NodeKind.MEM_LOAD,
            bytes_read=size if stores else 0.0,
            bytes_written=0.0 if stores else size,
            after=after,
            control=control,
            port=port,
            in_place=in_place,
        )

    def collective(
        self,
        name: str,
        kind: CollectiveKind,
        groups: GroupSet,
        tensor: Tensor,
        *,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
        in_place: bool = False,
    ) -> int:
        """A collective of ``tensor``, the whole buffer: the result of an all-gather, the operand of others.
        Groups have more than one rank.
        """
        size = groups.group_size
        if size == 1:
            raise InvariantError(f"{name}: a collective of one rank")
        whole = self.bytes_of(tensor)
        operand, result = (whole / cuts for cuts in cuts_of(kind, size))
        reads, writes = (_part(tensor, each / whole) for each in (operand, result))
        node = self.node(
            name,
            f"c10d::{_CALLED[kind]}",
            OpClass.COLLECTIVE,
            [reads],
            [writes],
            kind=NodeKind.COLLECTIVE,
            in_place=in_place,
            after=after,
            control=control,
            port=port,
        )
        group_set = self.builder.group_set(groups)
        if self.queues:
            self.builder.set(node, stream=_FIRST_QUEUE + group_set)
        self.builder.add_collective(
            node,
            kind,
            group_set=group_set,
            comm_bytes=operand,
            operand_bytes=operand,
            result_bytes=result,
            reduction="add" if kind in REDUCES else "",
        )
        return node

    def message(
        self,
        name: str,
        way: Permutation,
        tensor: Tensor,
        tag: int,
        *,
        sends: bool,
        after: Sequence[Value] = (),
        port: str = "",
    ) -> int:
        """A message along a permutation: its sending or its receiving half."""
        kind = NodeKind.SEND if sends else NodeKind.RECV
        size = self.bytes_of(tensor)
        node = self.node(
            name,
            "c10d::send" if sends else "c10d::recv_",
            OpClass.P2P,
            [tensor] if sends else [],
            [] if sends else [tensor],
            kind=kind,
            after=after,
            port=port,
        )
        self.builder.add_p2p(node, permutation=self.builder.permutation(way), comm_bytes=size, tag=tag)
        if self.queues and sends:
            self.builder.set(node, stream=_MESSAGES)
        if not sends:
            self.part.posts.append(node)
        return node

    def permute(
        self,
        name: str,
        way: Permutation,
        tensor: Tensor,
        *,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
    ) -> int:
        """Every rank sends along a permutation and receives."""
        node = self.node(
            name,
            "c10d::permute",
            OpClass.P2P,
            [tensor],
            [tensor],
            kind=NodeKind.PERMUTE,
            after=after,
            control=control,
        )
        if self.queues:
            self.builder.set(node, stream=_RING)
        self.builder.add_p2p(
            node, permutation=self.builder.permutation(way), comm_bytes=self.bytes_of(tensor), tag=-1
        )
        return node


def _need(node: int, chunk: int, pass_: str, port: str) -> Need:
    """A need of this chunk's ``forward``, or of the chunk that ``forward@2`` names."""
    kind, _, other = pass_.partition("@")
    return Need(node, kind, int(other) if other else chunk, port)


_CALLED: Mapping[CollectiveKind, str] = {
    CollectiveKind.ALL_REDUCE: "allreduce_",
    CollectiveKind.ALL_GATHER: "_allgather_base_",
    CollectiveKind.REDUCE_SCATTER: "_reduce_scatter_base_",
    CollectiveKind.ALL_TO_ALL: "alltoall_base_",
}


def _elements(tensor: Tensor) -> float:
    count = 1.0
    for extent in tensor.shape:
        count *= extent
    return count


def _part(tensor: Tensor, share: float) -> Tensor:
    """A share of a tensor, cut along its first dimension where it can be."""
    if share == 1:
        return tensor
    first, *others = tensor.shape
    cut = first * share
    if cut == int(cut) and cut >= 1:
        return Tensor((int(cut), *others), tensor.dtype)
    return Tensor((max(1, round(_elements(tensor) * share)),), tensor.dtype)
