"""The layers of each way of writing a transformer, operator by operator.

Products of four-dimensional values whose batch and heads are not adjacent in memory copy them first (what
``torch.matmul`` does): queries, keys and values, and the output back. ``compiled`` leaves out what a compiler
fuses into its neighbours: scales and masks into softmax, sums into norms, activations into one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hespas.generators.eager.kernels import Operators, Shape
from hespas.generators.eager.model import EagerModel
from hespas.graph import OpClass

__all__ = ["Layers"]

_ROUTING = ("aten::max", "aten::argmax", "aten::one_hot", "aten::cumsum", "aten::le", "aten::mul")


@dataclass(frozen=True, slots=True)
class Layers:
    """``batch`` sequences of ``length`` tokens through the layers of a model."""

    model: EagerModel
    ops: Operators
    batch: int
    length: int

    @property
    def rows(self) -> int:
        """Tokens."""
        return self.batch * self.length

    @property
    def value(self) -> Shape:
        """The residual stream."""
        return (self.rows, self.model.hidden)

    def run(self) -> None:
        """The whole model, embeddings and head included."""
        _WRITTEN[self.model.written](self)

    # Attention.

    def _scores(self) -> Shape:
        return (self.batch, self.model.heads, self.length, self.length)

    def _views(self) -> None:
        """Queries, keys and values in the order of their product."""
        shape = (self.batch, self.model.heads, self.length, self.model.head_dim)
        for _ in "query", "key", "value":
            self.ops.copy(shape)

    def _attend(self, between: Callable[[Shape], None]) -> None:
        """Scores, what is done to them, their softmax, and the values they weigh."""
        model, ops, length = self.model, self.ops, self.length
        scores, batch = self._scores(), self.batch * model.heads
        ops.batched(batch, length, length, model.head_dim)
        if not ops.compiled:
            between(scores)
        ops.softmax(scores)
        if model.written != "opt":
            ops.dropout(scores)
        ops.batched(batch, length, model.head_dim, length)
        ops.copy((self.batch, model.heads, length, model.head_dim))

    def _scaled(self, scores: Shape) -> None:
        self.ops.unary("aten::div.Scalar", scores)
        self.ops.later(lambda: self.ops.unary("aten::div.Scalar", scores))

    def _bert_mask(self, scores: Shape) -> None:
        self._scaled(scores)
        self.ops.add(scores, (self.batch, 1, 1, self.length))

    def _gpt2_mask(self, scores: Shape) -> None:
        self._scaled(scores)
        self.ops.unary("aten::where", scores)
        self.ops.later(lambda: self.ops.unary("aten::where", scores))

    def _opt_mask(self, scores: Shape) -> None:
        """The mask, and the lowest number as a lower bound, whose backward compares twice."""
        ops = self.ops
        ops.add(scores, (self.batch, 1, self.length, self.length))
        ops.unary("aten::maximum", scores)

        def backward() -> None:
            ops.binary("aten::eq", scores)
            ops.unary("aten::div.Scalar", scores)
            ops.binary("aten::where", scores)
            ops.binary("aten::lt", scores)
            ops.unary("aten::masked_fill_", scores)

        ops.later(backward)

    # What surrounds it.

    def _residual(self, *, norm: bool = False) -> None:
        """The stream takes up a result; ``norm``: and is normalised."""
        self.ops.dropout(self.value)
        if not (norm and self.ops.compiled):
            self.ops.add(self.value)
        if norm:
            self.ops.layer_norm(*self.value)

    def _gelu(self, shape: Shape) -> None:
        self.ops.unary("aten::gelu", shape, transcendentals=1.0)
        self.ops.later(lambda: self.ops.binary("aten::gelu_backward", shape, transcendentals=1.0))

    def _relu(self, shape: Shape) -> None:
        self.ops.unary("aten::relu", shape)
        self.ops.later(lambda: self.ops.binary("aten::threshold_backward", shape))

    def _gelu_new(self, shape: Shape) -> None:
        """0.5 x (1 + tanh(c (x + d x^3))), an operator each."""
        ops = self.ops
        if ops.compiled:
            ops.unary("aten::gelu", shape, transcendentals=1.0)
            return
        ops.unary("aten::mul.Scalar", shape)
        ops.unary("aten::pow.Tensor_Scalar", shape)
        ops.unary("aten::mul.Scalar", shape)
        ops.binary("aten::add", shape)
        ops.unary("aten::mul.Scalar", shape)
        ops.unary("aten::tanh", shape, transcendentals=1.0)
        ops.unary("aten::add.Scalar", shape)
        ops.binary("aten::mul", shape)

        def backward() -> None:
            for _ in "halved", "one more":
                ops.binary("aten::mul", shape)
            ops.binary("aten::tanh_backward", shape)
            for _ in "c", "d", "of the power", "0.5":
                ops.unary("aten::mul.Scalar", shape)
            ops.unary("aten::pow.Tensor_Scalar", shape)
            ops.binary("aten::mul", shape)
            for _ in "x", "x^3":
                ops.binary("aten::add", shape)

        ops.later(backward)

    def _norm(self) -> None:
        self.ops.layer_norm(*self.value)

    def _loss(self) -> None:
        """Backward starts at the logits: those of one class a token, and of their logarithmic softmax."""
        ops, shape = self.ops, (self.rows, self.model.vocab)

        def backward() -> None:
            ops.unary("aten::fill_", shape)
            ops.node("aten::_log_softmax_backward_data", OpClass.NORMALIZATION, [shape, shape], [shape])

        ops.later(backward)

    # Whole models.

    def bert(self) -> None:
        """Norms after each sum; the head of classification, in training that of masked words."""
        model, ops, rows = self.model, self.ops, self.rows
        h = model.hidden
        ops.module = "embeddings"
        for table in model.vocab, model.positions, 2:
            ops.embedding(rows, table, h)
        ops.add(self.value)
        ops.add(self.value)
        self._norm()
        ops.dropout(self.value)
        for layer in range(model.layers):
            ops.module = f"layer.{layer}"
            for joins in False, True, True:
                ops.linear(rows, h, h, joins=joins)
            self._views()
            self._attend(self._bert_mask)
            ops.linear(rows, h, h)
            self._residual(norm=True)
            ops.linear(rows, h, model.ffn)
            self._gelu((rows, model.ffn))
            ops.linear(rows, model.ffn, h)
            self._residual(norm=True)
        ops.module = "head"
        if ops.training:
            ops.linear(rows, h, h)
            self._gelu(self.value)
            self._norm()
            ops.linear(rows, h, model.vocab)
            self._loss()
        else:
            ops.linear(self.batch, h, h)
            ops.unary("aten::tanh", (self.batch, h), transcendentals=1.0)
            ops.linear(self.batch, h, 2)

    def gpt2(self) -> None:
        """Norms before; queries, keys and values from one product."""
        model, ops, rows = self.model, self.ops, self.rows
        h = model.hidden
        ops.module = "embeddings"
        for table in model.vocab, model.positions:
            ops.embedding(rows, table, h)
        ops.add(self.value)
        ops.dropout(self.value)
        for layer in range(model.layers):
            ops.module = f"layer.{layer}"
            self._norm()
            ops.linear(rows, h, 3 * h)
            ops.later(self._join_heads)
            self._views()
            self._attend(self._gpt2_mask)
            ops.linear(rows, h, h)
            self._residual()
            self._norm()
            ops.linear(rows, h, model.ffn)
            self._gelu_new((rows, model.ffn))
            ops.linear(rows, model.ffn, h)
            self._residual()
        self._language_head()

    def _join_heads(self) -> None:
        rows, h = self.value
        self.ops.node("aten::cat", OpClass.MOVE, [(rows, h)] * 3, [(rows, 3 * h)], flops=0.0)

    def _language_head(self) -> None:
        ops, model = self.ops, self.model
        ops.module = "head"
        self._norm()
        ops.linear(self.rows, model.hidden, model.vocab, bias=False)
        self._loss()

    def opt(self) -> None:
        """Norms before; scaled queries; scores bounded below."""
        model, ops, rows = self.model, self.ops, self.rows
        h = model.hidden
        ops.module = "embeddings"
        for table in model.vocab, model.positions:
            ops.embedding(rows, table, h)
        ops.add(self.value)
        for layer in range(model.layers):
            ops.module = f"layer.{layer}"
            self._norm()
            ops.linear(rows, h, h)
            ops.unary("aten::mul.Scalar", self.value)
            ops.later(lambda: ops.unary("aten::mul.Scalar", self.value))
            for _ in "key", "value":
                ops.linear(rows, h, h, joins=True)
            self._views()
            self._attend(self._opt_mask)
            ops.linear(rows, h, h)
            self._residual()
            self._norm()
            ops.linear(rows, h, model.ffn)
            self._relu((rows, model.ffn))
            ops.linear(rows, model.ffn, h)
            self._residual()
        self._language_head()

    def switch(self) -> None:
        """Encoder and decoder of T5, every second layer of experts that are run one after another."""
        model, ops = self.model, self.ops
        for part in "encoder", "decoder":
            ops.module = f"{part}.embeddings"
            ops.embedding(self.rows, model.vocab, model.hidden)
            ops.dropout(self.value)
            for layer in range(model.layers):
                ops.module = f"{part}.{layer}"
                for _ in range(1 if part == "encoder" else 2):
                    self._t5_attention()
                self._experts() if layer % 2 else self._dense(self.rows)
            ops.module = part
            self._root_mean_square()
        ops.module = "head"
        ops.unary("aten::mul.Scalar", self.value)
        ops.linear(self.rows, model.hidden, model.vocab, bias=False)
        self._loss()

    def _root_mean_square(self) -> None:
        """T5's norm, an operator each."""
        ops, value = self.ops, self.value
        ops.unary("aten::pow.Tensor_Scalar", value)
        ops.node("aten::mean", OpClass.REDUCTION, [value], [(self.rows, 1)])
        ops.unary("aten::add.Scalar", (self.rows, 1))
        ops.unary("aten::rsqrt", (self.rows, 1), transcendentals=1.0)
        ops.binary("aten::mul", value, (self.rows, 1))
        ops.binary("aten::mul", value, (self.model.hidden,))

        def backward() -> None:
            for _ in "scale", "its input", "row", "its input again", "of the power":
                ops.binary("aten::mul", value)
            for _ in "scale", "row":
                ops.node("aten::sum", OpClass.REDUCTION, [value], [(self.rows, 1)])
            ops.unary("aten::pow.Tensor_Scalar", value)
            ops.binary("aten::add", value)
            ops.accumulate((self.model.hidden,))

        ops.later(backward)

    def _t5_attention(self) -> None:
        model, ops = self.model, self.ops
        self._root_mean_square()
        for joins in False, True, True:
            ops.linear(self.rows, model.hidden, model.inner, bias=False, joins=joins)
        self._views()
        self._attend(lambda scores: ops.binary("aten::add_", scores))
        ops.linear(self.rows, model.inner, model.hidden, bias=False)
        self._residual()

    def _dense(self, rows: int) -> None:
        self._root_mean_square()
        self._feed_forward(rows)
        self._residual()

    def _feed_forward(self, rows: int) -> None:
        model, ops = self.model, self.ops
        ops.linear(rows, model.hidden, model.ffn, bias=False)
        self._relu((rows, model.ffn))
        ops.dropout((rows, model.ffn))
        ops.linear(rows, model.ffn, model.hidden, bias=False)

    def _experts(self) -> None:
        """Each expert in turn: which tokens are its own, its layers over as many rows
        as it may have, and their place in the result.
        """
        model, ops = self.model, self.ops
        routed, most = (self.rows, model.experts), min(self.rows, self.batch * model.capacity)
        self._root_mean_square()
        ops.linear(self.rows, model.hidden, model.experts, bias=False)
        ops.softmax(routed)
        for op in _ROUTING:
            ops.unary(op, routed)
        ops.unary("aten::clone", self.value)
        for _ in range(model.experts):
            for op in "aten::ne", "aten::count_nonzero", "aten::nonzero":
                ops.unary(op, (self.rows,))
            ops.node("aten::index", OpClass.GATHER, [(most, model.hidden)], [(most, model.hidden)], flops=0.0)
            ops.node("aten::copy_", OpClass.MOVE, [(most, model.hidden)], [(most, model.hidden)], flops=0.0)
            self._feed_forward(most)
            ops.unary("aten::nonzero", (self.rows,))
            shape = (most, model.hidden)
            ops.node("aten::index_put_", OpClass.SCATTER, [shape], [shape], flops=0.0)
        ops.binary("aten::mul", self.value, (self.rows, 1))
        ops.later(lambda: ops.binary("aten::mul", self.value, (self.rows, 1)))
        self._residual()


_WRITTEN: Mapping[str, Callable[[Layers], None]] = MappingProxyType(
    {"bert": Layers.bert, "gpt2": Layers.gpt2, "opt": Layers.opt, "switch": Layers.switch}
)
