"""A training step of a deep learning recommendation model (DLRM, arXiv 1906.00091).

Dense features pass a bottom MLP, categorical ones are looked up in tables and summed by bag; all pairs of
features are multiplied, and a top MLP gives one number. MLPs are data parallel; tables are spread over all
ranks, so pooled rows of the whole batch change ranks forward and their gradients backward: tables or columns
by all-to-all, rows by reduce-scatter and all-gather. Backward is two products for each of forward, but for
the first layer, whose input needs no gradient. Tables are updated where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from hespas.generators.llm.assemble import Part
from hespas.generators.llm.kernels import Kernels, Tensor
from hespas.generators.spec import Account, Bounded
from hespas.graph import CollectiveKind, GraphBuilder, OpClass, StepFacts, StridedGroups, Workload
from hespas.graph.errors import UsageError

__all__ = ["DlrmStep", "Sharding"]

_MOST_RANKS, _MOST_ELEMENTS = 1 << 24, 1 << 60

Sharding = Literal["table", "row", "column"]
"""How tables are spread over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmStep(Bounded):
    """``batch`` samples on each rank; ``tables`` of ``rows`` x ``width`` with ``lookups`` a sample.
    ``bottom`` are widths from the dense features to before ``width``; ``top`` of layers before the last,
    which has one.
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
        """Sharding and ranks."""
        return f"dlrm-{self.sharding}{self.ranks}"

    @property
    def bottom_layers(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer."""
        return list(pairwise((*self.bottom, self.width)))

    @property
    def top_layers(self) -> list[tuple[int, int]]:
        """From pairs of features and the dense ones to one number."""
        features = self.tables + 1
        return list(pairwise((features * (features - 1) // 2 + self.width, *self.top, 1)))

    @property
    def dense_parameters(self) -> int:
        """Weights and biases of both MLPs."""
        return sum((inputs + 1) * outputs for inputs, outputs in (*self.bottom_layers, *self.top_layers))

    def account(self) -> Account:
        """FLOPs of products; sums of bags are no products. Memory is not accounted for."""
        layers = [*self.bottom_layers, *self.top_layers]
        weights = sum(inputs * outputs for inputs, outputs in layers)
        first = layers[0][0] * layers[0][1]
        sample = 6 * weights - 2 * first + 6 * (self.tables + 1) ** 2 * self.width
        flops = float(sample) * self.batch * self.ranks
        parameters = float(self.dense_parameters + self.tables * self.rows * self.width)
        return Account(parameters=parameters, model_flops_per_step=flops, hardware_flops_per_step=flops)

    @property
    def element(self) -> str:
        """Element type of the tensors: products in TF32 are of f32."""
        return "f32" if self.dtype == "tf32" else self.dtype

    def workload(self) -> Workload:
        """One class of ranks."""
        self._check()
        builder = GraphBuilder(self.name)
        _Step(self, Kernels(builder, Part("step", 0, 0), tf32=self.dtype == "tf32")).run()
        flops = self.account().model_flops_per_step
        facts = StepFacts(kind="recommendation", model_flops=flops, ranks=self.ranks, dtype=self.dtype)
        return Workload.spmd(builder.build(), self.ranks, facts.metadata())

    def _check(self) -> None:
        if min(self.ranks, self.batch, self.tables, self.rows, self.width, self.lookups) < 1:
            raise UsageError("ranks, batch, tables, rows, width and lookups are at least 1")
        state = self.tables * self.rows * self.width
        work = self.batch * (self.tables + 1) ** 2 * self.width * self.lookups
        if self.ranks > _MOST_RANKS or max(state, work) > _MOST_ELEMENTS:
            raise UsageError(
                f"more than {_MOST_RANKS:,} ranks, or sizes whose product is beyond 2**60",
                hint="smaller `ranks`, `batch`, tables, rows or width",
            )
        if self.sharding not in {"table", "row", "column"}:
            raise UsageError(f"no such sharding: {self.sharding!r}", hint="table, row or column")
        if self.dtype not in {"bf16", "f16", "f32", "tf32"}:
            raise UsageError(f"no element type to train in: {self.dtype!r}", hint="bf16, f16, f32 or tf32")
        split = {"table": self.tables, "row": self.rows, "column": self.width}[self.sharding]
        if split % self.ranks:
            raise UsageError(f"{self.ranks} ranks do not divide {split} (sharded by {self.sharding})")


class _Step:
    """Adds the nodes of a step; ``talked`` is the last collective."""

    def __init__(self, step: DlrmStep, kernels: Kernels) -> None:
        self.step, self.kernels = step, kernels
        self.talked = -1
        self.made: list[int] = []

    def run(self) -> None:
        step = self.step
        indices = self._exchange("indices", "ids", -1)
        pooled = self._exchange("pooled", "forward", self._lookup(indices))
        bottom = self._mlp("bottom", step.bottom_layers, -1)
        features = step.tables + 1
        size = (features, features, step.width)
        met = self._product("interaction", size, [pooled, bottom[-1]], step.batch)
        top = self._mlp("top", step.top_layers, met)
        loss = self._vector("loss", "cross_entropy", (step.batch, 1), [top[-1]])
        given = self._mlp_backward("top", step.top_layers, [met, *top], loss)
        size = (features, step.width, features)
        parts = [
            self._product(f"interaction.d{side}", size, [given, pooled, bottom[-1]], step.batch)
            for side in "ab"
        ]
        given = self._vector("interaction.sum", "add", (step.batch, features, step.width), parts)
        back = self._exchange("gradients", "backward", given)
        self._mlp_backward("bottom", step.bottom_layers, [-1, *bottom], given)
        self._update(back, indices)
        self._dense_update()

    def _vector(self, name: str, what: str, shape: tuple[int, ...], after: list[int]) -> int:
        value = Tensor(shape, self.step.element)
        return self.kernels.vector(name, what, [value] * len(after), [value], after=after)

    def _product(self, name: str, sizes: tuple[int, int, int], after: list[int], batch: int = 1) -> int:
        dtype = self.step.element
        return self.kernels.product(name, sizes, left=dtype, result=dtype, batch=batch, after=after)

    def _mlp(self, name: str, layers: list[tuple[int, int]], source: int) -> list[int]:
        """The result of each layer."""
        found = [source]
        for place, (inputs, outputs) in enumerate(layers):
            made = self._product(f"{name}.{place}", (self.step.batch, outputs, inputs), found[-1:])
            found.append(self._vector(f"{name}.{place}.relu", "relu2", (self.step.batch, outputs), [made]))
        return found[1:]

    def _mlp_backward(self, name: str, layers: list[tuple[int, int]], values: list[int], given: int) -> int:
        """The gradient of what comes in, where something made it; gradients of weights are kept."""
        batch = self.step.batch
        for place in reversed(range(len(layers))):
            inputs, outputs = layers[place]
            after = [given, values[place + 1]]
            given = self._vector(f"{name}.{place}.relu.dx", "relu2", (batch, outputs), after)
            made = self._product(f"{name}.{place}.dw", (inputs, outputs, batch), [given, values[place]])
            self.made.append(made)
            if values[place] >= 0:
                given = self._product(f"{name}.{place}.dx", (batch, inputs, outputs), [given])
        return given

    def _exchange(self, name: str, way: str, source: int) -> int:
        """Indices to where their rows are, pooled rows to their samples, or gradients of these back."""
        step = self.step
        if step.ranks == 1:
            return source
        everybody = step.batch * step.ranks
        kind = CollectiveKind.ALL_TO_ALL
        value = Tensor((step.batch, step.tables * step.width), step.element)
        if way == "ids":
            value = Tensor((step.batch, step.tables * step.lookups), "i64")
            if step.sharding == "column":
                kind, value = CollectiveKind.ALL_GATHER, Tensor((everybody, *value.shape[1:]), "i64")
        elif step.sharding == "row":
            forward = way == "forward"
            kind = CollectiveKind.REDUCE_SCATTER if forward else CollectiveKind.ALL_GATHER
            value = Tensor((everybody, *value.shape[1:]), step.element)
        return self._collective(name, kind, value, [source])

    def _collective(self, name: str, kind: CollectiveKind, value: Tensor, after: list[int]) -> int:
        groups = StridedGroups.all_ranks(self.step.ranks)
        self.talked = self.kernels.collective(name, kind, groups, value, after=after, control=[self.talked])
        return self.talked

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank, for the whole batch: rows that are looked up, indices of them, and their sums."""
        step, everybody = self.step, self.step.batch * self.step.ranks
        tables = step.tables // step.ranks if step.sharding == "table" else step.tables
        width = step.width // step.ranks if step.sharding == "column" else step.width
        picked = everybody * tables * step.lookups
        if step.sharding == "row":
            picked = -(-picked // step.ranks)
        pooled = Tensor((everybody * tables, width), step.element)
        return Tensor((picked, width), step.element), Tensor((picked,), "i64"), pooled

    def _lookup(self, indices: int) -> int:
        """Rows are read and summed by bag."""
        rows, ids, pooled = self._tables()
        return self.kernels.node(
            "lookup",
            "aten::_embedding_bag",
            OpClass.GATHER,
            [rows, ids],
            [pooled],
            flops=float(max(0, (rows.shape[0] - pooled.shape[0]) * rows.shape[1])),
            after=[indices],
        )

    def _update(self, gradients: int, indices: int) -> None:
        """Gradients are added to rows, which are read and written."""
        rows, ids, pooled = self._tables()
        self.kernels.node(
            "update",
            "aten::_embedding_bag_dense_backward",
            OpClass.SCATTER,
            [rows, pooled, ids],
            [rows],
            flops=2.0 * rows.shape[0] * rows.shape[1],
            after=[gradients, indices],
        )

    def _dense_update(self) -> None:
        """Gradients of both MLPs are averaged, and their weights updated."""
        size = Tensor((self.step.dense_parameters,), self.step.element)
        after = self.made
        if self.step.ranks > 1:
            after = [self._collective("dense", CollectiveKind.ALL_REDUCE, size, after)]
        self.kernels.vector("adam", "adam", [size] * 4, [size] * 3, after=after)
