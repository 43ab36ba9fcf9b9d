"""Training step of a deep learning recommendation model (DLRM, arXiv 1906.00091).

Dense features pass through a bottom MLP. Categorical features are looked up in tables, and the rows of a
sample are summed. All pairs of features are multiplied, and a top MLP computes one number. MLPs are data
parallel. Tables are sharded over all ranks. Therefore the summed rows of the whole batch are exchanged in the
forward pass, and their gradients in the backward pass: by all-to-all if ranks hold tables or columns, by
reduce-scatter and all-gather if they hold rows. The backward pass has two products for each forward product,
except in the first layer, whose input needs no gradient. Tables are updated on their ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from hespas.generators.llm.kernels import KernelWriter, TensorSpec
from hespas.generators.llm.schedule import PassTemplate
from hespas.generators.spec import Account, Bounded, check_positive
from hespas.graph import CollectiveKind, GraphBuilder, OpClass, StepFacts, StridedGroups, Workload
from hespas.graph.errors import UsageError

__all__ = ["DlrmStep", "Sharding"]

_MOST_RANKS, _MOST_ELEMENTS = 1 << 24, 1 << 60

Sharding = Literal["table", "row", "column"]
"""Sharding of tables over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmStep(Bounded):
    """Settings of a training step of DLRM (recommendation model) with ``batch`` samples on each rank. Each of
    ``tables`` embedding tables has ``rows`` rows of ``width`` elements, and ``lookups`` rows are read per
    sample.

    ``bottom`` lists the widths of the bottom MLP, from the dense features up to its last hidden layer; the
    result has ``width`` elements. ``top`` lists the widths of the top MLP without the last layer, which has
    width 1.
    """

    ranks: int = 8
    batch: int = 2048
    tables: int = 64
    rows: int = 1_000_000
    width: int = 128
    lookups: int = 32
    bottom: tuple[int, ...] = (13, 512, 256)
    top: tuple[int, ...] = (1024, 1024, 512)
    sharding: Sharding = "table"
    dtype: str = "f32"

    @property
    def name(self) -> str:
        """Return the name of the step, with the sharding and the ranks."""
        return f"dlrm-{self.sharding}{self.ranks}"

    @property
    def bottom_layers(self) -> list[tuple[int, int]]:
        """Return the inputs and outputs of each layer of the bottom MLP."""
        return list(pairwise((*self.bottom, self.width)))

    @property
    def top_layers(self) -> list[tuple[int, int]]:
        """Return the inputs and outputs of each layer of the top MLP, from pairs of features and dense ones
        to one number.
        """
        features = self.tables + 1
        return list(pairwise((features * (features - 1) // 2 + self.width, *self.top, 1)))

    @property
    def dense_parameters(self) -> int:
        """Return the number of weights and biases of both MLPs."""
        return sum((inputs + 1) * outputs for inputs, outputs in (*self.bottom_layers, *self.top_layers))

    def account(self) -> Account:
        """Return the FLOPs of the matrix products; the sums of looked-up rows are not counted. Memory is not
        included.
        """
        layers = [*self.bottom_layers, *self.top_layers]
        weights = sum(inputs * outputs for inputs, outputs in layers)
        first = layers[0][0] * layers[0][1]
        sample = 6 * weights - 2 * first + 6 * (self.tables + 1) ** 2 * self.width
        flops = float(sample) * self.batch * self.ranks
        parameters = float(self.dense_parameters + self.tables * self.rows * self.width)
        return Account(parameters=parameters, model_flops_per_step=flops, hardware_flops_per_step=flops)

    @property
    def element(self) -> str:
        """Return the element type of the tensors; products in TF32 have f32 tensors."""
        return "f32" if self.dtype == "tf32" else self.dtype

    def workload(self) -> Workload:
        """Make a workload of one rank class."""
        sizes = ("ranks", "batch", "tables", "rows", "width", "lookups")
        check_positive({name: getattr(self, name) for name in sizes})
        state = self.tables * self.rows * self.width
        work = self.batch * (self.tables + 1) ** 2 * self.width * self.lookups
        if self.ranks > _MOST_RANKS:
            raise UsageError(
                f"{self.ranks:,} ranks exceed the limit of {_MOST_RANKS:,}", hint="choose fewer `ranks`"
            )
        if max(state, work) > _MOST_ELEMENTS:
            raise UsageError(
                f"the embedding tables have {float(state):.3g} elements, and the step {float(work):.3g} "
                "multiplications: the limit of both is 2**60",
                hint="choose a smaller `batch`, `tables`, `rows` or `width`",
            )
        if self.sharding not in {"table", "row", "column"}:
            raise UsageError(f"unknown sharding {self.sharding!r}", hint="choose table, row or column")
        if self.dtype not in {"bf16", "f16", "f32", "tf32"}:
            raise UsageError(
                f"{self.dtype!r} is not an element type for training", hint="choose bf16, f16, f32 or tf32"
            )
        split = {"table": self.tables, "row": self.rows, "column": self.width}[self.sharding]
        if split % self.ranks:
            unit = {"table": "tables", "row": "rows", "column": "columns"}[self.sharding]
            raise UsageError(
                f"{split:,} {unit} cannot be divided over {self.ranks} ranks (sharding {self.sharding})",
                hint=f"choose a number of {unit} that is a multiple of the ranks",
            )
        builder = GraphBuilder(self.name)
        _DlrmWriter(self, KernelWriter(builder, PassTemplate("step", 0, 0), tf32=self.dtype == "tf32")).run()
        flops = self.account().model_flops_per_step
        facts = StepFacts(kind="recommendation", model_flops=flops, ranks=self.ranks, dtype=self.dtype)
        return Workload.spmd(builder.build(), self.ranks, facts.metadata())


class _DlrmWriter:
    """Writer of the nodes of a DLRM step to a graph."""

    def __init__(self, step: DlrmStep, kernels: KernelWriter) -> None:
        self.step, self.kernels = step, kernels
        self.last_collective = -1
        self.weight_gradients: list[int] = []

    def run(self) -> None:
        step = self.step
        indices = self._exchange("indices", "ids", -1)
        # The rows that this rank looks up for the whole batch, their indices, and their sums.
        samples = step.batch * step.ranks
        tables = step.tables // step.ranks if step.sharding == "table" else step.tables
        width = step.width // step.ranks if step.sharding == "column" else step.width
        picked = samples * tables * step.lookups
        if step.sharding == "row":
            picked = -(-picked // step.ranks)
        rows, ids = TensorSpec((picked, width), step.element), TensorSpec((picked,), "i64")
        sums = TensorSpec((samples * tables, width), step.element)
        lookup = self.kernels.node(
            "lookup",
            "aten::_embedding_bag",
            OpClass.GATHER,
            [rows, ids],
            [sums],
            flops=float(max(0, (rows.shape[0] - sums.shape[0]) * rows.shape[1])),
            after=[indices],
        )
        pooled = self._exchange("pooled", "forward", lookup)
        bottom = self._mlp("bottom", step.bottom_layers, -1)
        features = step.tables + 1
        size = (features, features, step.width)
        pairs = self._product("interaction", size, [pooled, bottom[-1]], step.batch)
        top = self._mlp("top", step.top_layers, pairs)
        loss = self._vector("loss", "cross_entropy", (step.batch, 1), [top[-1]])
        grad = self._mlp_backward("top", step.top_layers, [pairs, *top], loss)
        size = (features, step.width, features)
        parts = [
            self._product(f"interaction.d{side}", size, [grad, pooled, bottom[-1]], step.batch)
            for side in "ab"
        ]
        grad = self._vector("interaction.sum", "add", (step.batch, features, step.width), parts)
        back = self._exchange("gradients", "backward", grad)
        self._mlp_backward("bottom", step.bottom_layers, [-1, *bottom], grad)
        self.kernels.node(
            "update",
            "aten::_embedding_bag_dense_backward",
            OpClass.SCATTER,
            [rows, sums, ids],
            [rows],
            flops=2.0 * rows.shape[0] * rows.shape[1],
            after=[back, indices],
        )
        parameters = TensorSpec((step.dense_parameters,), step.element)
        reduced = self.weight_gradients
        if step.ranks > 1:
            reduced = [self._collective("dense", CollectiveKind.ALL_REDUCE, parameters, reduced)]
        self.kernels.vector("adam", "adam", [parameters] * 4, [parameters] * 3, after=reduced)

    def _vector(self, name: str, kernel: str, shape: tuple[int, ...], after: list[int]) -> int:
        value = TensorSpec(shape, self.step.element)
        return self.kernels.vector(name, kernel, [value] * len(after), [value], after=after)

    def _product(self, name: str, sizes: tuple[int, int, int], after: list[int], batch: int = 1) -> int:
        dtype = self.step.element
        return self.kernels.product(name, sizes, left=dtype, result=dtype, batch=batch, after=after)

    def _mlp(self, name: str, layers: list[tuple[int, int]], source: int) -> list[int]:
        """Add the forward layers of an MLP, and return the node of each layer's result."""
        results = [source]
        for layer, (inputs, outputs) in enumerate(layers):
            product = self._product(f"{name}.{layer}", (self.step.batch, outputs, inputs), results[-1:])
            shape = (self.step.batch, outputs)
            results.append(self._vector(f"{name}.{layer}.relu", "relu2", shape, [product]))
        return results[1:]

    def _mlp_backward(self, name: str, layers: list[tuple[int, int]], values: list[int], grad: int) -> int:
        """Add the backward pass of an MLP. Return the gradient of its input, which is computed only if a node
        produced that input.
        """
        batch = self.step.batch
        for layer in reversed(range(len(layers))):
            inputs, outputs = layers[layer]
            after = [grad, values[layer + 1]]
            grad = self._vector(f"{name}.{layer}.relu.dx", "relu2", (batch, outputs), after)
            weights = self._product(f"{name}.{layer}.dw", (inputs, outputs, batch), [grad, values[layer]])
            self.weight_gradients.append(weights)
            if values[layer] >= 0:
                grad = self._product(f"{name}.{layer}.dx", (batch, inputs, outputs), [grad])
        return grad

    def _exchange(self, name: str, direction: str, source: int) -> int:
        """Add the communication of the embedding tables in one ``direction``. It sends indices to the ranks
        that store the rows, pooled rows to the ranks of the samples, or gradients back to the ranks of the
        rows.
        """
        step = self.step
        if step.ranks == 1:
            return source
        samples = step.batch * step.ranks
        kind = CollectiveKind.ALL_TO_ALL
        value = TensorSpec((step.batch, step.tables * step.width), step.element)
        if direction == "ids":
            value = TensorSpec((step.batch, step.tables * step.lookups), "i64")
            if step.sharding == "column":
                kind, value = CollectiveKind.ALL_GATHER, TensorSpec((samples, *value.shape[1:]), "i64")
        elif step.sharding == "row":
            forward = direction == "forward"
            kind = CollectiveKind.REDUCE_SCATTER if forward else CollectiveKind.ALL_GATHER
            value = TensorSpec((samples, *value.shape[1:]), step.element)
        return self._collective(name, kind, value, [source])

    def _collective(self, name: str, kind: CollectiveKind, value: TensorSpec, after: list[int]) -> int:
        groups = StridedGroups.all_ranks(self.step.ranks)
        self.last_collective = self.kernels.collective(
            name, kind, groups, value, after=after, control=[self.last_collective]
        )
        return self.last_collective
