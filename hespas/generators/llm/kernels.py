"""Kernels of a pass as graph nodes, with their tensors, costs and dependencies.

A pass is the forward or backward pass of one micro-batch. It is written once, as a part of a template graph.
Values have names, called ports, by which other passes refer to them.

A matrix product M x K by K x N costs 2 M K N FLOPs, reads its operands once and writes its result once; a
product that accumulates also reads its result. Fused attention reads and writes only queries, keys, values
and results (arXiv 2205.14135). It costs 2 x (head + value head) FLOPs per pair of query and key, and 2.5
times as much in the backward pass, which recomputes the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from hespas.generators.llm.schedule import PassTemplate, PortNeed
from hespas.generators.spec import REDUCES, cuts_of
from hespas.graph import CollectiveKind, NodeKind, OpClass, Permutation
from hespas.graph.builder import GraphBuilder
from hespas.graph.columns import DType, dtype
from hespas.graph.errors import InvariantError
from hespas.graph.groups import GroupSet
from hespas.graph.opgraph import FULL_F32_PRODUCTS

__all__ = ["AttentionShape", "KernelWriter", "TensorSpec", "Value"]

_ACCUMULATOR = "f32"
_MESSAGES, _RING, _FIRST_QUEUE = 0, 1, 2
"""Streams of messages between stages, of messages around a ring, and of the first communicator."""


Value = int | str
"""Node of this part (-1: none), or a port: of the forward pass, or ``backward:port`` of another pass."""


class TensorSpec(NamedTuple):
    """Shape and element type of a value."""

    shape: tuple[int, ...]
    dtype: str


class AttentionShape(NamedTuple):
    """Sizes of attention on a rank; ``pairs`` counts the unmasked pairs of query and key of one sequence."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    pairs: float


class _VectorKernel(NamedTuple):
    """Elementwise, row-wise or indexing kernel: operator name, class, and FLOPs and transcendentals per
    element.
    """

    op: str
    op_class: OpClass
    flops: float
    transcendentals: float = 0.0


_VECTORS: Mapping[str, _VectorKernel] = {
    "add": _VectorKernel("aten::add", OpClass.ELEMENTWISE, 1.0),
    "mul": _VectorKernel("aten::mul", OpClass.ELEMENTWISE, 1.0),
    "add_rms_norm": _VectorKernel("fused_add_rms_norm", OpClass.NORMALIZATION, 5.0),
    "add_layer_norm": _VectorKernel("fused_add_layer_norm", OpClass.NORMALIZATION, 9.0),
    "rms_norm": _VectorKernel("aten::_fused_rms_norm", OpClass.NORMALIZATION, 4.0),
    "rms_norm_backward": _VectorKernel("aten::_fused_rms_norm_backward", OpClass.NORMALIZATION, 8.0),
    "layer_norm": _VectorKernel("aten::native_layer_norm", OpClass.NORMALIZATION, 8.0),
    "layer_norm_backward": _VectorKernel("aten::native_layer_norm_backward", OpClass.NORMALIZATION, 12.0),
    "rope": _VectorKernel("rotary_embedding", OpClass.ELEMENTWISE, 3.0),
    "silu": _VectorKernel("silu_and_mul", OpClass.TRANSCENDENTAL, 4.0, 1.0),
    "gelu": _VectorKernel("gelu", OpClass.TRANSCENDENTAL, 8.0, 1.0),
    "relu2": _VectorKernel("squared_relu", OpClass.ELEMENTWISE, 2.0),
    "softmax": _VectorKernel("aten::_softmax", OpClass.NORMALIZATION, 4.0, 1.0),
    "topk": _VectorKernel("aten::topk", OpClass.SORT, 1.0),
    "cross_entropy": _VectorKernel("cross_entropy", OpClass.NORMALIZATION, 4.0, 1.0),
    "cast": _VectorKernel("aten::_to_copy", OpClass.ELEMENTWISE, 0.0),
    "quantize": _VectorKernel("quantize", OpClass.QUANTIZE, 2.0),
    "absmax": _VectorKernel("absmax", OpClass.REDUCTION, 2.0),
    "permute": _VectorKernel("moe_permute", OpClass.GATHER, 0.0),
    "unpermute_backward": _VectorKernel("moe_unpermute_backward", OpClass.GATHER, 0.0),
    "unpermute": _VectorKernel("moe_unpermute", OpClass.SCATTER, 2.0),
    "sort": _VectorKernel("moe_sort_chunks", OpClass.GATHER, 0.0),
    "embedding": _VectorKernel("aten::embedding", OpClass.GATHER, 0.0),
    "embedding_backward": _VectorKernel("aten::embedding_dense_backward", OpClass.SCATTER, 1.0),
    "adam": _VectorKernel("aten::_fused_adamw_", OpClass.ELEMENTWISE, 12.0, 1.0),
    "norm": _VectorKernel("aten::norm", OpClass.REDUCTION, 2.0),
    "conv1d": _VectorKernel("causal_conv1d", OpClass.ELEMENTWISE, 8.0, 1.0),
    "decay": _VectorKernel("segment_sum_exp", OpClass.TRANSCENDENTAL, 2.0, 1.0),
    "copy": _VectorKernel("aten::copy_", OpClass.MOVE, 0.0),
    "cat": _VectorKernel("aten::cat", OpClass.MOVE, 0.0),
    "sum": _VectorKernel("aten::sum", OpClass.REDUCTION, 1.0),
}
"""Kernels by function. Operator names are from PyTorch and from the libraries that fuse them."""


@dataclass(slots=True)
class KernelWriter:
    """Writer that adds the nodes of one pass (``part``) to a template graph.

    ``module`` is the module path of the next nodes. ``follow`` lists nodes for which the next compute node
    waits. While ``again`` is True, nodes recompute the forward pass: the ports of their results are stored in
    ``local``, so that readers use the recomputed values. While ``in_order`` is True, kernels run after the
    kernels that were written before them. ``made`` collects the gradients of weights until a caller empties
    it. ``queues``: each communicator has a separate stream, as in NCCL, and sends to other stages share one
    stream. ``tf32``: f32 matmuls run on TF32 units, otherwise in IEEE f32. ``grouped``: the matmuls of
    several experts are one kernel, which reads their numbers of rows on the device, as in a CUDA graph of a
    whole step; otherwise the host launches one kernel per expert. ``pending`` maps a result to the residual
    stream to which it has yet to be added; ``sums`` maps a result to the node that added it.
    """

    builder: GraphBuilder
    part: PassTemplate
    module: str = ""
    again: bool = False
    in_order: bool = False
    local: dict[str, int] = field(default_factory=dict[str, int])
    follow: list[int] = field(default_factory=list[int])
    made: list[int] = field(default_factory=list[int])
    queues: bool = False
    tf32: bool = False
    grouped: bool = False
    pending: dict[Value, Value] = field(default_factory=dict["Value", "Value"])
    sums: dict[Value, Value] = field(default_factory=dict["Value", "Value"])
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _dtypes: dict[str, DType] = field(default_factory=dict[str, DType])

    def bytes_of(self, tensor: TensorSpec) -> float:
        """Return the bytes of a tensor."""
        return self.builder.types.bytes_of(self._row(tensor))

    def _row(self, tensor: TensorSpec) -> int:
        return self.builder.types.add(self._type(tensor.dtype), tensor.shape)

    def _type(self, name: str) -> DType:
        if name not in self._dtypes:
            self._dtypes[name] = dtype(name)
        return self._dtypes[name]

    def node(
        self,
        name: str,
        op: str,
        op_class: OpClass,
        reads: Sequence[TensorSpec],
        writes: Sequence[TensorSpec],
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
        """Add a node that depends on the values ``after`` (data) and the nodes ``control``, and return it.
        ``port`` is a name for its result, by which other passes refer to it.

        ``in_place`` is True if the result overwrites weights, gradients or states, so that it needs no new
        memory.
        """
        builder = self.builder
        operands = [self._row(tensor) for tensor in reads]
        results = [self._row(tensor) for tensor in writes]
        sizes = builder.types.bytes_of
        data, ports = self._resolve(after)
        followed: list[int] = []
        if kind is NodeKind.COMPUTE:
            followed, self.follow = self.follow, []
            followed += [self.part.tail] if self.in_order else []
        full = f"{self.module}.{name}" if self.module else name
        node = builder.add_node(
            name_id=builder.strings.add(full),
            op_id=builder.strings.add(op),
            op_class=op_class,
            kind=kind,
            data_deps=list(dict.fromkeys(data)),
            control_deps=list(dict.fromkeys(before for before in (*control, *followed) if before >= 0)),
            operands=operands,
            results=() if in_place else results,
            flops=flops,
            transcendentals=transcendentals,
            bytes_read=sum(map(sizes, operands)) if bytes_read is None else bytes_read,
            bytes_written=sum(map(sizes, results)) if bytes_written is None else bytes_written,
        )
        builder.set(node, framework_id=builder.strings.add(f"{self.part.kind}/{full.replace('.', '/')}"))
        part = self.part
        for pass_, needed in ports:
            pass_kind, _, chunk = pass_.partition("@")  # ``forward@2`` is of another chunk than this part
            part.needs.append(PortNeed(node, pass_kind, int(chunk) if chunk else part.chunk, needed))
        self.name_port(port, node)
        if kind is NodeKind.COMPUTE:
            part.head = node if part.head < 0 else part.head
            part.tail = node
        return node

    def first_compute(self, start: int) -> int:
        """Return the first compute node with a number of at least ``start``."""
        return self.builder.first_of_kind(NodeKind.COMPUTE, start)

    def count(self, key: str) -> int:
        """Return how many times this method was called with the same key before, for numbering equal
        names.
        """
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        return number

    def name_port(self, port: str, value: Value) -> None:
        """Give a value of this pass the name ``port``, by which other passes refer to it. A ``value`` that is
        itself a port of another pass is skipped.
        """
        if isinstance(value, str):
            value = self.local.get(value, -1)
        if port and value >= 0:
            (self.local if self.again else self.part.ports)[port] = value

    def named(self, value: Value, port: str) -> str:
        """Return the name (port) by which another pass reads a value. A value of this pass gets the name
        ``port``.
        """
        if isinstance(value, str):
            if value not in self.local:
                return value
            value = self.local[value]
        self.part.ports[port] = value
        return f"{self.part.kind}:{port}"

    def _resolve(self, values: Sequence[Value]) -> tuple[list[int], list[tuple[str, str]]]:
        """Return the dependencies on ``values``: nodes of this pass, and pairs of pass and port for values of
        other passes.
        """
        nodes: list[int] = []
        ports: list[tuple[str, str]] = []
        for value in values:
            if not isinstance(value, str):
                nodes += [value] if value >= 0 else []
                continue
            pass_, _, port = value.rpartition(":")
            own = self.local.get(value, self.part.ports.get(port, -1) if pass_ == self.part.kind else -1)
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
        op: str = "",
        accumulate: bool = False,
        in_place: bool = False,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
    ) -> int:
        """Add ``batch`` products of ``(m, n, k)``: M x K by K x N. ``accumulate`` adds to the previous
        result. ``op`` is the operation (empty: a matmul of PyTorch).
        """
        m, n, k = sizes
        lead = (batch,) if batch > 1 else ()
        right = right or left
        reads = [TensorSpec((*lead, m, k), left), TensorSpec((*lead, k, n), right)]
        writes = [TensorSpec((*lead, m, n), result)]
        flops = 2.0 * batch * m * n * k
        node = self.node(
            name,
            op or (("aten::_grouped_mm" if self.grouped else "aten::bmm") if batch > 1 else "aten::mm"),
            OpClass.CONTRACTION,
            reads + (writes if accumulate else []),
            writes,
            flops=flops,
            in_place=in_place,
            after=after,
            control=control,
            port=port,
        )
        self._add_contraction(node, (batch, m, n, k), (left, right), (flops, flops))
        return node

    def _add_contraction(
        self,
        node: int,
        extents: tuple[int, int, int, int],
        types: tuple[str, str],
        flops: tuple[float, float],
    ) -> None:
        """Record the extents and types of the matrix product that a node computes. ``flops`` are all FLOPs,
        then the useful FLOPs.
        """
        lhs, rhs, accumulator = (self._type(name).code for name in (*types, _ACCUMULATOR))
        batch, m, n, k = extents
        self.builder.add_contraction(
            node, batch=batch, m=m, n=n, k=k, flops=flops[0], useful_flops=flops[1],
            lhs=lhs, rhs=rhs, accumulator=accumulator, products=self._products(types),
        )  # fmt: skip

    def _products(self, types: tuple[str, str]) -> int:
        """Return the number of 16-bit matmuls that emulate one matmul: 1, or more for IEEE f32, which TF32
        units cannot compute.
        """
        return FULL_F32_PRODUCTS if types == ("f32", "f32") and not self.tf32 else 1

    def vector(
        self,
        name: str,
        kernel: str,
        reads: Sequence[TensorSpec],
        writes: Sequence[TensorSpec],
        *,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
        scale: float = 1.0,
        in_place: bool = False,
    ) -> int:
        """Add an elementwise, row-wise or indexing kernel and return its node. ``kernel`` is a key of the
        table ``_VECTORS``.

        The FLOPs are the kernel's FLOPs per element, multiplied by ``scale`` and by the elements of the first
        operand or the first result, whichever is larger. A kernel that gathers rows (embedding) reads only
        these rows.
        """
        spec = _VECTORS[kernel]
        elements = scale * max(_elements(tensor) for tensor in (*reads[:1], *writes[:1]))
        gathers = spec.op_class is OpClass.GATHER
        return self.node(
            name,
            spec.op,
            spec.op_class,
            reads,
            writes,
            flops=spec.flops * elements,
            transcendentals=spec.transcendentals * elements,
            bytes_read=sum(map(self.bytes_of, writes)) if gathers else None,
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
        """Add fused attention and return its node. The backward kernel recomputes the scores and computes the
        gradients of queries, keys and values.

        ``cache`` is the element type of keys and values if it differs from the type of queries. ``adds`` is
        True if the kernel adds its result (or the gradient of queries) to the result of attention to other
        keys.
        """
        q = TensorSpec((shape.batch, shape.heads, shape.queries, shape.head_dim), element)
        k = TensorSpec((shape.batch, shape.kv_heads, shape.keys, shape.head_dim), cache or element)
        v = TensorSpec((shape.batch, shape.kv_heads, shape.keys, shape.value_dim), cache or element)
        out = TensorSpec((shape.batch, shape.heads, shape.queries, shape.value_dim), element)
        sums = TensorSpec((shape.batch, shape.heads, shape.queries), "f32")
        dims = 2.0 * shape.batch * shape.heads * (shape.head_dim + shape.value_dim)
        if backward:
            # recomputed scores and gradients of queries and keys over the head, two products over the value
            # head
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
            self._add_contraction(node, sizes, (element, element), (dims * whole, dims * shape.pairs))
        return node

    def transfer(
        self,
        name: str,
        tensor: TensorSpec,
        *,
        stores: bool,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
        in_place: bool = False,
    ) -> int:
        """Add a copy between device and host and return its node. ``stores`` is True for a copy from the
        device to the host. Its bytes are counted once, for the host link.
        """
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
        tensor: TensorSpec,
        *,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
        port: str = "",
        in_place: bool = False,
    ) -> int:
        """Add a collective and return its node. ``tensor`` is the whole buffer: the result of an all-gather,
        the operand of other kinds.

        Raises ``InvariantError`` for groups of one rank.
        """
        size = groups.group_size
        if size == 1:
            raise InvariantError(f"{name}: a collective of one rank")
        whole = self.bytes_of(tensor)
        operand, result = (whole / parts for parts in cuts_of(kind, size))
        reads, writes = (_fraction(tensor, size_bytes / whole) for size_bytes in (operand, result))
        node = self.node(
            name,
            f"c10d::{_OP_NAMES[kind]}",
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
        permutation: Permutation,
        tensor: TensorSpec,
        tag: int,
        *,
        sends: bool,
        after: Sequence[Value] = (),
        port: str = "",
    ) -> int:
        """Add the send or the receive of messages along a permutation."""
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
        self.builder.add_p2p(
            node, permutation=self.builder.permutation(permutation), comm_bytes=size, tag=tag
        )
        if self.queues and sends:
            self.builder.set(node, stream=_MESSAGES)
        if not sends:
            self.part.posts.append(node)
        return node

    def permute(
        self,
        name: str,
        permutation: Permutation,
        tensor: TensorSpec,
        *,
        after: Sequence[Value] = (),
        control: Sequence[int] = (),
    ) -> int:
        """Add a node in which every rank sends and receives along a permutation."""
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
            node, permutation=self.builder.permutation(permutation), comm_bytes=self.bytes_of(tensor), tag=-1
        )
        return node


_OP_NAMES: Mapping[CollectiveKind, str] = {
    CollectiveKind.ALL_REDUCE: "allreduce_",
    CollectiveKind.ALL_GATHER: "_allgather_base_",
    CollectiveKind.REDUCE_SCATTER: "_reduce_scatter_base_",
    CollectiveKind.ALL_TO_ALL: "alltoall_base_",
}


def _elements(tensor: TensorSpec) -> float:
    return prod(tensor.shape, start=1.0)


def _fraction(tensor: TensorSpec, share: float) -> TensorSpec:
    """Return the tensor of a ``share`` of another one. It is cut along the first dimension if that divides
    evenly.
    """
    if share == 1:
        return tensor
    first, *others = tensor.shape
    cut = first * share
    if cut == int(cut) and cut >= 1:
        return TensorSpec((int(cut), *others), tensor.dtype)
    return TensorSpec((max(1, round(_elements(tensor) * share)),), tensor.dtype)
