"""PyTorch operators as nodes of a graph, and the operators of their backward passes.

Operators run in sequence in one stream, so each node depends on the previous one. The forward pass records
the backward pass of each operator on a tape. Elements are float32 and TF32 is off: a matrix product is
counted as six 16-bit products, as on hardware that emulates float32. This distinguishes it from a product on
TF32 units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from hespas.graph import GraphBuilder, NodeKind, OpClass
from hespas.graph.columns import DType, dtype
from hespas.graph.opgraph import FULL_F32_PRODUCTS

__all__ = ["EagerOperators", "Shape"]

Shape = tuple[int, ...]

_TRANSPOSED = "{1,3,2,0}"
"""Memory order of (batch, heads, length, size) that is a view of (batch, length, heads, size)."""


@dataclass(slots=True)
class EagerOperators:
    """Writer of PyTorch operators to a graph.

    ``compiled``: operators between matrix products are fused, as in TorchInductor.
    """

    builder: GraphBuilder
    training: bool
    compiled: bool
    module: str = ""
    tape: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    _last: int = -1
    _element: DType = field(default_factory=lambda: dtype("f32"))

    def record(self, backward: Callable[[], None]) -> None:
        """Record the backward pass of the last operators: ``backward`` is a function that writes it later, in
        reverse order. Do nothing if the step has no backward pass.
        """
        if self.training:
            module = self.module

            def run() -> None:
                self.module = module
                backward()

            self.tape.append(run)

    def backward(self) -> None:
        """Write the backward pass: run the entries of the tape from the last to the first."""
        while self.tape:
            self.tape.pop()()

    def node(
        self,
        op: str,
        op_class: OpClass,
        reads: Sequence[Shape],
        writes: Sequence[Shape],
        *,
        flops: float = 1.0,
        transcendentals: float = 0.0,
        strided: bool = False,
        bytes_read: float | None = None,
    ) -> int:
        """Add an operator and return its node. ``flops`` and ``transcendentals`` are per element of its
        largest tensor. ``strided`` is True if the memory order of its first operand differs from the result.
        """
        builder = self.builder
        encoding = builder.strings.add(_TRANSPOSED) if strided else 0
        add, size = builder.types.add, builder.types.bytes_of
        operands = [
            add(self._element, shape, encoding=encoding if position == 0 else 0)
            for position, shape in enumerate(reads)
        ]
        results = [add(self._element, shape) for shape in writes]
        elements = float(max(prod(shape) for shape in (*reads, *writes)))
        name = f"{self.module}.{op.rpartition('::')[2]}" if self.module else op
        node = builder.add_node(
            name_id=builder.strings.add(name),
            op_id=builder.strings.add(op),
            op_class=op_class,
            kind=NodeKind.COMPUTE,
            data_deps=[self._last] if self._last >= 0 else [],
            control_deps=[],
            operands=operands,
            results=results,
            flops=flops * elements,
            transcendentals=transcendentals * elements,
            bytes_read=sum(map(size, operands)) if bytes_read is None else bytes_read,
            bytes_written=sum(map(size, results)),
        )
        self._last = node
        return node

    def product(self, op: str, batch: int, m: int, n: int, k: int) -> None:
        """Add ``batch`` matrix products of M x K by K x N."""
        lead = (batch,) if batch > 1 else ()
        work = 2.0 * batch * m * n * k
        reads: list[Shape] = [(*lead, m, k), (*lead, k, n)]
        if op == "aten::addmm":
            reads.append((n,))
        largest = max(prod(reads[0]), prod(reads[1]), batch * m * n)
        node = self.node(op, OpClass.CONTRACTION, reads, [(*lead, m, n)], flops=work / largest)
        code = self._element.code
        self.builder.add_contraction(
            node, batch=batch, m=m, n=n, k=k, flops=work, useful_flops=work,
            lhs=code, rhs=code, accumulator=code, products=FULL_F32_PRODUCTS,
        )  # fmt: skip

    def linear(self, rows: int, inputs: int, outputs: int, *, bias: bool = True, joins: bool = False) -> None:
        """Add a linear layer. Its backward pass computes the gradients of input, weights and bias.

        ``joins`` is True if the input is also read by other operators. The gradient of the input is then
        added to their gradient.
        """
        self.product("aten::addmm" if bias else "aten::mm", 1, rows, outputs, inputs)

        def backward() -> None:
            self.product("aten::mm", 1, rows, inputs, outputs)
            self.product("aten::mm", 1, outputs, inputs, rows)
            self.accumulate((outputs, inputs))
            if bias:
                self.node("aten::sum", OpClass.REDUCTION, [(rows, outputs)], [(outputs,)])
                self.accumulate((outputs,))
            if joins:
                self.add((rows, inputs), taped=False)

        self.record(backward)

    def batched(self, batch: int, m: int, n: int, k: int) -> None:
        """Add a batched matrix product of two tensors that both need gradients."""
        self.product("aten::bmm", batch, m, n, k)

        def backward() -> None:
            self.product("aten::bmm", batch, m, k, n)
            self.product("aten::bmm", batch, k, n, m)

        self.record(backward)

    def unary(self, op: str, shape: Shape, *, transcendentals: float = 0.0) -> None:
        """Add an elementwise operator of one tensor."""
        op_class = OpClass.TRANSCENDENTAL if transcendentals else OpClass.ELEMENTWISE
        self.node(op, op_class, [shape], [shape], transcendentals=transcendentals)

    def binary(
        self, op: str, shape: Shape, other: Shape | None = None, *, transcendentals: float = 0.0
    ) -> None:
        """Add an elementwise operator of two tensors; ``other`` is the shape of a broadcast
        second operand.
        """
        op_class = OpClass.TRANSCENDENTAL if transcendentals else OpClass.ELEMENTWISE
        self.node(op, op_class, [shape, other or shape], [shape], transcendentals=transcendentals)

    def add(self, shape: Shape, other: Shape | None = None, *, taped: bool = True) -> None:
        """Add the elementwise sum of two tensors. Both operands receive the gradient of the sum. If ``taped``
        is True and the operands have equal shapes, the backward pass adds this gradient to another gradient
        of the same tensor.
        """
        self.binary("aten::add", shape, other)
        if taped and other is None:
            self.record(lambda: self.binary("aten::add", shape))

    def accumulate(self, shape: Shape) -> None:
        """Add the gradient of a parameter to its gradient of the previous step."""
        self.binary("aten::add_", shape)

    def copy(self, shape: Shape) -> None:
        """Copy a strided view to contiguous memory. The backward pass copies the gradient in the other
        direction.
        """

        def clone() -> None:
            self.node("aten::clone", OpClass.MOVE, [shape], [shape], flops=0.0, strided=True)

        clone()
        self.record(clone)

    def dropout(self, shape: Shape) -> None:
        """Add a dropout if the step is training. Its backward pass scales the mask and multiplies the
        gradient by it.
        """
        if not self.training:
            return
        self.node("aten::native_dropout", OpClass.ELEMENTWISE, [shape], [shape], flops=3.0)

        def backward() -> None:
            self.unary("aten::mul.Scalar", shape)
            self.binary("aten::mul", shape)

        self.record(backward)

    def softmax(self, shape: Shape) -> None:
        """Add a softmax over the last dimension. The backward pass first multiplies the gradient by the
        result, like PyTorch's CUDA kernel.
        """
        kind = OpClass.NORMALIZATION
        self.node("aten::_softmax", kind, [shape], [shape], flops=4.0, transcendentals=1.0)

        def backward() -> None:
            self.binary("aten::mul", shape)
            self.node("aten::_softmax_backward_data", kind, [shape, shape], [shape], flops=4.0)

        self.record(backward)

    def layer_norm(self, rows: int, width: int) -> None:
        """Add a layer norm. The backward pass also computes the gradients of scale and shift."""
        shape, kind = (rows, width), OpClass.NORMALIZATION
        self.node("aten::native_layer_norm", kind, [shape], [shape], flops=8.0)

        def backward() -> None:
            self.node("aten::native_layer_norm_backward", kind, [shape, shape], [shape], flops=12.0)
            self.node("aten::sum", OpClass.REDUCTION, [shape, shape], [(width,), (width,)], flops=2.0)
            for _ in "scale", "shift":
                self.accumulate((width,))

        self.record(backward)

    def embedding(self, tokens: int, vocab: int, width: int) -> None:
        """Add an embedding lookup. The gradient has the size of the whole table."""
        shape = (tokens, width)
        self.node(
            "aten::embedding", OpClass.GATHER, [(vocab, width)], [shape], flops=0.0,
            bytes_read=4.0 * tokens * width,
        )  # fmt: skip

        def backward() -> None:
            table = (vocab, width)
            self.unary("aten::fill_", table)
            self.node("aten::embedding_dense_backward", OpClass.SCATTER, [shape], [shape])
            self.accumulate(table)

        self.record(backward)
