"""Transformers that PyTorch runs operator by operator: published sizes, layers of each family, and steps.

``torch.matmul`` first copies four-dimensional operands whose batch and heads are not adjacent in memory. The
copies of queries, keys and values, and of the output, are therefore nodes too. ``compiled`` omits operators
that a compiler fuses into others: scales and masks into softmax, sums into norms, activation functions into
one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from hespas.generators.eager.kernels import EagerOperators, Shape
from hespas.generators.spec import Account, Bounded, check_positive
from hespas.graph import GraphBuilder, OpClass, StepFacts, Workload
from hespas.graph.errors import UsageError

__all__ = ["EagerFamily", "EagerLayers", "EagerModel", "EagerStep", "eager_model", "eager_models"]

EagerFamily = Literal["bert", "gpt2", "opt", "switch"]
"""Model family of Hugging Face transformers with attention ``eager``: BERT (arXiv 1810.04805), GPT-2, OPT
(arXiv 2205.01068), Switch (arXiv 2101.03961, encoder and decoder of T5).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerModel(Bounded):
    """Sizes of a model. ``layers`` counts the layers of each stack (Switch has two: encoder and decoder),
    ``positions`` the learned position embeddings (Switch: 0). In every second layer of a mixture-of-experts
    model, ``experts`` share the tokens. An expert takes at most ``capacity`` tokens of a sequence.
    """

    name: str
    written: EagerFamily
    hidden: int
    layers: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int = 0
    experts: int = 0
    capacity: int = 0
    source: str = ""

    @property
    def inner(self) -> int:
        """Return the total width of all heads."""
        return self.heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Return the number of parameters. The head of a language model shares the embedding; BERT has a
        pooler.
        """
        h, f = self.hidden, self.ffn
        if self.written == "switch":
            attention, dense = 3 * self.layers * (4 * h * self.inner + h), 2 * self.layers * h
            sparse = 2 * (self.layers // 2)
            layers = (2 * self.layers - sparse) * 2 * h * f + sparse * self.experts * (2 * h * f + h)
            return self.vocab * h + attention + dense + layers + 2 * h
        layer = 4 * h * (h + 1) + f * (h + 1) + h * (f + 1) + 4 * h
        embeddings = (self.vocab + self.positions) * h
        if self.written == "bert":
            return embeddings + 2 * h + 2 * h + self.layers * layer + h * (h + 1)
        return embeddings + self.layers * layer + 2 * h

    def forward_flops(self, batch: int, length: int, *, training: bool) -> float:
        """Return the FLOPs of the matmuls in the forward pass: two per weight and token, plus attention,
        which grows with the number of token pairs.
        """
        h, f, rows = self.hidden, self.ffn, batch * length
        attention = 2.0 * rows * 4 * h * self.inner + 4.0 * batch * length**2 * self.inner
        dense = 4.0 * rows * h * f
        if self.written == "switch":
            sparse = 2 * (self.layers // 2)
            most = min(rows, batch * self.capacity)
            routed = self.experts * (2.0 * rows * h + 4.0 * most * h * f)
            layers = 3 * self.layers * attention + (2 * self.layers - sparse) * dense + sparse * routed
        else:
            layers = self.layers * (attention + dense)
        if self.written == "bert":
            head = rows * h * (h + self.vocab) if training else batch * h * (h + 2)
            return layers + 2.0 * head
        return layers + 2.0 * rows * h * self.vocab

    def check(self) -> None:
        """Raise ``UsageError`` for sizes below 1."""
        sizes = ["hidden", "layers", "heads", "head_dim", "ffn", "vocab"]
        if self.written == "switch":
            sizes += ["experts", "capacity"]
        check_positive({name: getattr(self, name) for name in sizes}, owner=f"{self.name}: ")


def _gpt(name: str, sizes: tuple[int, int, int, int], source: str) -> EagerModel:
    """Return a GPT model from its hidden size, layers, heads and positions, in this order in ``sizes``."""
    hidden, layers, heads, positions = sizes
    return EagerModel(
        name=name, written="gpt2", hidden=hidden, layers=layers, heads=heads, head_dim=hidden // heads,
        ffn=4 * hidden, vocab=50257, positions=positions, source=source,
    )  # fmt: skip


_NEUSIGHT = "github.com/sitar-lab/NeuSight, DLmodel_configs"
_MODELS = (
    EagerModel(
        name="bert-large", written="bert", hidden=1024, layers=24, heads=16, head_dim=64, ffn=4096,
        vocab=30522, positions=512, source="arXiv 1810.04805, table of models",
    ),
    _gpt("gpt2-large", (1280, 36, 20, 1024), "huggingface.co/openai-community/gpt2-large config.json"),
    _gpt("gpt3-xl", (3072, 24, 24, 2048), f"{_NEUSIGHT}/gpt3_xl.json (2,048 wide in arXiv 2005.14165)"),
    _gpt("gpt3-2.7b", (2560, 32, 32, 2048), "arXiv 2005.14165, table 2.1"),
    EagerModel(
        name="opt-1.3b", written="opt", hidden=2048, layers=24, heads=32, head_dim=64, ffn=8192,
        vocab=50272, positions=2050, source="huggingface.co/facebook/opt-1.3b config.json",
    ),
    EagerModel(
        name="switch-xl-4", written="switch", hidden=1024, layers=24, heads=32, head_dim=128, ffn=16384,
        vocab=32128, experts=4, capacity=64, source=f"{_NEUSIGHT}/switchxl4.json",
    ),
)  # fmt: skip
_BY_NAME: Mapping[str, EagerModel] = MappingProxyType({model.name: model for model in _MODELS})


def eager_models() -> tuple[EagerModel, ...]:
    """Return the models that ship with the package."""
    return _MODELS


def eager_model(name: str) -> EagerModel:
    """Return a model by name. Raises ``UsageError`` for an unknown one."""
    if name not in _BY_NAME:
        raise UsageError(f"no model {name!r}", hint=f"choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


_ROUTING = ("aten::max", "aten::argmax", "aten::one_hot", "aten::cumsum", "aten::le", "aten::mul")


@dataclass(frozen=True, slots=True)
class EagerLayers:
    """Writer of a model's PyTorch operators for ``batch`` sequences of ``length`` tokens."""

    model: EagerModel
    ops: EagerOperators
    batch: int
    length: int

    @property
    def rows(self) -> int:
        """Return the number of tokens in the batch."""
        return self.batch * self.length

    @property
    def value(self) -> Shape:
        """Return the shape of the residual stream: batch, length, hidden size."""
        return (self.rows, self.model.hidden)

    def run(self) -> None:
        """Write the whole model, including embeddings and head."""
        {"bert": self.bert, "gpt2": self.gpt2, "opt": self.opt, "switch": self.switch}[self.model.written]()

    def _copy_heads(self) -> None:
        """Copy queries, keys and values into the memory order that the batched matrix product needs."""
        shape = (self.batch, self.model.heads, self.length, self.model.head_dim)
        for _ in "query", "key", "value":
            self.ops.copy(shape)

    def _attend(self, mask: Callable[[Shape], None]) -> None:
        """Write attention: the scores, their scale and ``mask``, the softmax, and the weighted sum of
        values.
        """
        model, ops, length = self.model, self.ops, self.length
        scores, batch = (self.batch, model.heads, length, length), self.batch * model.heads
        ops.batched(batch, length, length, model.head_dim)
        if not ops.compiled:
            mask(scores)
        ops.softmax(scores)
        if model.written != "opt":
            ops.dropout(scores)
        ops.batched(batch, length, model.head_dim, length)
        ops.copy((self.batch, model.heads, length, model.head_dim))

    def _scale(self, scores: Shape) -> None:
        self.ops.unary("aten::div.Scalar", scores)
        self.ops.record(lambda: self.ops.unary("aten::div.Scalar", scores))

    def _opt_mask(self, scores: Shape) -> None:
        """Write the attention mask of OPT. OPT adds the mask to the scores and clamps the result at the
        lowest finite number. The backward pass of this clamp has two comparisons.
        """
        ops = self.ops
        ops.add(scores, (self.batch, 1, self.length, self.length))
        ops.unary("aten::maximum", scores)

        def backward() -> None:
            ops.binary("aten::eq", scores)
            ops.unary("aten::div.Scalar", scores)
            ops.binary("aten::where", scores)
            ops.binary("aten::lt", scores)
            ops.unary("aten::masked_fill_", scores)

        ops.record(backward)

    def _residual(self, *, norm: bool = False) -> None:
        """Add a block's result to the residual stream. With ``norm``, also normalise the sum."""
        self.ops.dropout(self.value)
        if not (norm and self.ops.compiled):
            self.ops.add(self.value)
        if norm:
            self.ops.layer_norm(*self.value)

    def _gelu(self, shape: Shape) -> None:
        self.ops.unary("aten::gelu", shape, transcendentals=1.0)
        self.ops.record(lambda: self.ops.binary("aten::gelu_backward", shape, transcendentals=1.0))

    def _relu(self, shape: Shape) -> None:
        self.ops.unary("aten::relu", shape)
        self.ops.record(lambda: self.ops.binary("aten::threshold_backward", shape))

    def _gelu_new(self, shape: Shape) -> None:
        """Write 0.5 x (1 + tanh(c (x + d x^3))) with one operator per operation."""
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

        ops.record(backward)

    def _norm(self) -> None:
        self.ops.layer_norm(*self.value)

    def _loss(self) -> None:
        """Append the start of the backward pass to the tape: the gradients of the loss and of the
        log-softmax.
        """
        ops, shape = self.ops, (self.rows, self.model.vocab)

        def backward() -> None:
            ops.unary("aten::fill_", shape)
            ops.node("aten::_log_softmax_backward_data", OpClass.NORMALIZATION, [shape, shape], [shape])

        ops.record(backward)

    def bert(self) -> None:
        """Write BERT: norms after each sum, and the classification head (in training, the masked-language
        head).
        """
        model, ops, rows = self.model, self.ops, self.rows
        h = model.hidden
        ops.module = "embeddings"
        for table in model.vocab, model.positions, 2:
            ops.embedding(rows, table, h)
        ops.add(self.value)
        ops.add(self.value)
        self._norm()
        ops.dropout(self.value)

        def mask(scores: Shape) -> None:
            self._scale(scores)
            ops.add(scores, (self.batch, 1, 1, self.length))

        for layer in range(model.layers):
            ops.module = f"layer.{layer}"
            for joins in False, True, True:
                ops.linear(rows, h, h, joins=joins)
            self._copy_heads()
            self._attend(mask)
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
        """Write GPT-2: norms before each block; queries, keys and values from one product."""
        model, ops, rows = self.model, self.ops, self.rows
        h = model.hidden
        ops.module = "embeddings"
        for table in model.vocab, model.positions:
            ops.embedding(rows, table, h)
        ops.add(self.value)
        ops.dropout(self.value)

        def mask(scores: Shape) -> None:
            self._scale(scores)
            ops.unary("aten::where", scores)
            ops.record(lambda: ops.unary("aten::where", scores))

        def join_heads() -> None:
            ops.node("aten::cat", OpClass.MOVE, [(rows, h)] * 3, [(rows, 3 * h)], flops=0.0)

        for layer in range(model.layers):
            ops.module = f"layer.{layer}"
            self._norm()
            ops.linear(rows, h, 3 * h)
            ops.record(join_heads)
            self._copy_heads()
            self._attend(mask)
            ops.linear(rows, h, h)
            self._residual()
            self._norm()
            ops.linear(rows, h, model.ffn)
            self._gelu_new((rows, model.ffn))
            ops.linear(rows, model.ffn, h)
            self._residual()
        self._language_head()

    def _language_head(self) -> None:
        ops, model = self.ops, self.model
        ops.module = "head"
        self._norm()
        ops.linear(self.rows, model.hidden, model.vocab, bias=False)
        self._loss()

    def opt(self) -> None:
        """Write OPT: norms before each block; scaled queries; scores with a lower bound."""
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
            ops.record(lambda: ops.unary("aten::mul.Scalar", self.value))
            for _ in "key", "value":
                ops.linear(rows, h, h, joins=True)
            self._copy_heads()
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
        """Write Switch: encoder and decoder of T5; every second layer has experts, which run in sequence."""
        model, ops = self.model, self.ops
        for part in "encoder", "decoder":
            ops.module = f"{part}.embeddings"
            ops.embedding(self.rows, model.vocab, model.hidden)
            ops.dropout(self.value)
            for layer in range(model.layers):
                ops.module = f"{part}.{layer}"
                for _ in range(1 if part == "encoder" else 2):
                    self._root_mean_square()
                    for joins in False, True, True:
                        ops.linear(self.rows, model.hidden, model.inner, bias=False, joins=joins)
                    self._copy_heads()
                    self._attend(lambda scores: ops.binary("aten::add_", scores))
                    ops.linear(self.rows, model.inner, model.hidden, bias=False)
                    self._residual()
                if layer % 2:
                    self._experts()
                else:
                    self._root_mean_square()
                    self._feed_forward(self.rows)
                    self._residual()
            ops.module = part
            self._root_mean_square()
        ops.module = "head"
        ops.unary("aten::mul.Scalar", self.value)
        ops.linear(self.rows, model.hidden, model.vocab, bias=False)
        self._loss()

    def _root_mean_square(self) -> None:
        """Write T5's norm (root mean square) with one operator per arithmetic operation."""
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

        ops.record(backward)

    def _feed_forward(self, rows: int) -> None:
        model, ops = self.model, self.ops
        ops.linear(rows, model.hidden, model.ffn, bias=False)
        self._relu((rows, model.ffn))
        ops.dropout((rows, model.ffn))
        ops.linear(rows, model.ffn, model.hidden, bias=False)

    def _experts(self) -> None:
        """Write the experts one after the other. For each expert, its tokens are selected, its layers run on
        the maximum number of tokens, and the result is scattered.
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
        ops.record(lambda: ops.binary("aten::mul", self.value, (self.rows, 1)))
        self._residual()


_MOST_ELEMENTS, _MOST_LAYERS = 1 << 50, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStep(Bounded):
    """Step of ``batch`` sequences of ``length`` tokens on one device.

    ``training`` adds the backward pass of a loss. Its gradients are accumulated, and no optimizer runs.
    ``compiled``: operators between matmuls are fused, as in TorchInductor; forward pass only.
    """

    model: EagerModel
    batch: int = 1
    length: int = 1024
    training: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """Return the name of the step, with the model, the mode, and the sizes."""
        mode = "train" if self.training else "compiled" if self.compiled else "forward"
        return f"{self.model.name}-{mode}-{self.length}-{self.batch}"

    def workload(self) -> Workload:
        """Make a workload of one rank. Raises ``UsageError`` for invalid sizes, or for a compiled training
        step.
        """
        model = self.model
        model.check()
        check_positive({"batch": self.batch, "length": self.length})
        if self.training and self.compiled:
            raise UsageError(
                "`compiled` is not available for training steps",
                hint="generate the forward pass only, or an eager step",
            )
        if model.positions and self.length > model.positions:
            raise UsageError(
                f"{model.name} has {model.positions:,} positions, but a sequence has {self.length:,} tokens",
                hint="choose a shorter `length`",
            )
        scores = self.batch * model.heads * self.length**2
        if model.layers > _MOST_LAYERS:
            raise UsageError(
                f"{model.layers:,} layers exceed the limit of {_MOST_LAYERS:,}", hint="choose fewer layers"
            )
        if scores > _MOST_ELEMENTS:
            raise UsageError(
                f"{float(scores):.3g} attention scores (batch x heads x length^2) exceed the limit of 2**50",
                hint="choose a smaller `batch` or `length`",
            )
        builder = GraphBuilder(self.name)
        ops = EagerOperators(builder, self.training, self.compiled)
        EagerLayers(model, ops, self.batch, self.length).run()
        ops.backward()
        facts = StepFacts(
            kind="eager",
            model_flops=self.account().model_flops_per_step,
            ranks=1,
            tokens=float(self.batch * self.length),
            dtype="f32",
            framework="torch.compile" if self.compiled else "torch",
            phase="training" if self.training else "inference",
        )
        return Workload.spmd(builder.build(), 1, facts.metadata())

    def account(self) -> Account:
        """Return the FLOPs of products; backward has two for each forward product. Memory is not included."""
        forward = self.model.forward_flops(self.batch, self.length, training=self.training)
        flops = forward * (3.0 if self.training else 1.0)
        return Account(
            parameters=float(self.model.parameters), model_flops_per_step=flops, hardware_flops_per_step=flops
        )
