"""What one rank works on, and the steps that blocks share: norms, parallel linear layers, their collectives.

Sizes on a rank (arXiv 2205.05198): ``tokens`` of a micro-batch inside tensor-parallel regions, ``rows`` of
them outside: with sequence parallelism one part in ``tp``. A column-parallel product is preceded by an
all-gather of its input, a row-parallel one followed by a reduce-scatter of its output; without sequence
parallelism the first is nothing and the second an all-reduce. The backward pass mirrors this, and gathers the
input once more for the gradient of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hespas.generators.llm.kernels import Kernels, Tensor, Value
from hespas.generators.llm.layout import Groups, Layout
from hespas.generators.llm.model import Attention, Block, Experts, LatentAttention, Mlp, Model
from hespas.generators.llm.settings import Precision, Training
from hespas.graph import CollectiveKind, StridedGroups

__all__ = ["Linear", "Rank"]

_Deferred = Callable[[Kernels], object]
_SCALE = Tensor((1,), "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A matrix ``inputs`` x ``outputs`` of a rank, by which ``rows`` are multiplied; ``count`` of them beside
    each other (experts). ``format`` is that of its operands (empty: that of the run), ``adapter`` the rank
    of the adapters beside it (0: it has none).
    """

    name: str
    inputs: int
    outputs: int
    rows: int
    count: int = 1
    format: str = ""
    adapter: int = 0


@dataclass(frozen=True)
class Rank:
    """Sizes and habits of the ranks of a job. ``deferred``: gradients of weights wait here for a pass of
    their own (zero bubble); None: they are made where they can be. ``batch_tokens``: tokens of a pass where
    it is no micro-batch of training. ``serves``: there is no backward pass.
    """

    model: Model
    layout: Layout
    training: Training
    deferred: list[_Deferred] | None = None
    batch_tokens: int = 0
    serves: bool = False

    @cached_property
    def groups(self) -> Groups:
        """Who talks to whom."""
        return Groups(self.layout)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this context rank."""
        return self.batch_tokens or self.training.micro_batch * self.training.seq // self.layout.cp

    @cached_property
    def rows(self) -> int:
        """Tokens outside tensor-parallel regions."""
        return self.tokens // (self.layout.tp if self.layout.has_sequence_parallel else 1)

    @cached_property
    def expert_rows(self) -> int:
        """Tokens that a rank routes to experts: those that no other tensor rank routes."""
        return self.tokens // self.layout.tp

    def routed(self, block: Experts) -> int:
        """Copies of tokens that a rank sends to experts in a micro-batch."""
        return round(self.expert_rows * block.topk * self.training.expert_room)

    def received(self, block: Experts) -> int:
        """Copies of tokens that the experts of the busiest rank work on in a micro-batch, those that the
        tensor ranks of experts gather included.
        """
        return round(self.expert_rows * block.topk * self.training.expert_load * self.layout.etp)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.model.hidden

    @property
    def precision(self) -> Precision:
        """Number formats."""
        return self.training.precision

    @property
    def trains_weights(self) -> bool:
        """Whether the matrices themselves are trained, not adapters beside them."""
        return self.training.lora_rank == 0

    def adapter(self, block: Block) -> int:
        """The rank of the adapters beside the linear layers of a block; 0 where it has none."""
        attention = isinstance(block, Attention | LatentAttention)
        dense = isinstance(block, Mlp) and not self.training.lora_attention_only
        return self.training.lora_rank if attention or dense else 0

    def learns(self, layer: Linear) -> bool:
        """Whether a layer's backward pass makes gradients of weights, its own or those of its adapters."""
        return self.trains_weights or layer.adapter > 0

    @property
    def gradient(self) -> str:
        """Element type of accumulated gradients."""
        return self.precision.compute if self.training.pure_16bit else self.precision.gradient

    @cached_property
    def stream(self) -> Tensor:
        """The residual stream on this rank."""
        return Tensor((self.rows, self.hidden), self.precision.compute)

    @cached_property
    def whole(self) -> Tensor:
        """The same inside tensor-parallel regions."""
        return Tensor((self.tokens, self.hidden), self.precision.compute)

    def value(self, rows: int, columns: int) -> Tensor:
        """A matrix in the format of activations."""
        return Tensor((rows, columns), self.precision.compute)

    # --- norms and residuals

    def norm(self, k: Kernels, name: str, x: Value, port: str) -> Value:
        """A norm over the residual stream, with the addition in front of it where that is left to it."""
        what, one = f"{self.model.norm}_norm", [self.stream]
        if x not in k.pending:
            return k.vector(name, what, one, one, after=[x], port=port)
        before = k.pending.pop(x)
        node = k.vector(name, f"add_{what}", one * 2, one * 2, after=[before, x], port=port)
        k.sums[x] = node
        k.name_port(port.removesuffix("norm") + "input", node)
        return node

    def norm_backward(self, k: Kernels, name: str, grad: Value, x: Value, skip: Value) -> Value:
        """The gradient of a norm's input, to which that of the residual connection is added."""
        reads = [self.stream, self.stream, self.stream]
        what = f"{self.model.norm}_norm_backward"
        return k.vector(name, what, reads, [self.stream], after=[grad, x, skip])

    def residual(self, k: Kernels, x: Value, y: Value, name: str = "residual") -> Value:
        """The sum of the stream and what a block adds: a kernel of its own, or of the next norm where a
        compiler merges elementwise operations.
        """
        x = k.sums.get(x, x)
        if self.training.style == "megatron":
            return k.vector(name, "add", [self.stream, self.stream], [self.stream], after=[x, y])
        k.pending[y] = x
        return y

    def settled(self, k: Kernels, x: Value) -> Value:
        """The stream with what is yet to be added."""
        if x not in k.pending:
            return x
        return k.vector("residual", "add", [self.stream] * 2, [self.stream], after=[k.pending.pop(x), x])

    def added(self, k: Kernels, key: str, x: Value, y: Value) -> Value:
        """The stream with what a block adds, which some models normalise first."""
        if self.model.post_norms:
            k.name_port(f"{key}.post_input", y)
            y = self.norm(k, "post_norm", y, "")
        return self.residual(k, x, y)

    def added_backward(self, k: Kernels, key: str, grad: Value) -> Value:
        """The gradient of what a block adds."""
        if self.model.post_norms:
            return self.norm_backward(k, "post_norm.backward", grad, f"{key}.post_input", -1)
        return grad

    # --- collectives of tensor parallelism

    @property
    def scatter_name(self) -> str:
        """How the sum over tensor ranks is made."""
        return "reduce_scatter" if self.layout.has_sequence_parallel else "all_reduce"

    def gather(self, k: Kernels, name: str, x: Value, port: str = "", control: Sequence[Value] = ()) -> Value:
        """The whole rows from the parts that tensor ranks hold; as it is where each has all."""
        if not self.layout.has_sequence_parallel:
            k.name_port(port, x)
            return x
        extra = [each for each in control if not isinstance(each, str)]
        return k.collective(
            name,
            CollectiveKind.ALL_GATHER,
            self.groups.tensor,
            self.whole,
            after=[x],
            control=extra,
            port=port,
        )

    def scatter(self, k: Kernels, name: str, y: Value) -> Value:
        """The sum over tensor ranks, of which each keeps its part, or all."""
        if self.layout.tp == 1:
            return y
        kind = (
            CollectiveKind.REDUCE_SCATTER if self.layout.has_sequence_parallel else CollectiveKind.ALL_REDUCE
        )
        return k.collective(name, kind, self.groups.tensor, self.whole, after=[y])

    def gather_columns(self, k: Kernels, name: str, x: Value, columns: int) -> Value:
        """Whole rows of another width from parts."""
        if not self.layout.has_sequence_parallel:
            return x
        whole = self.value(self.tokens, columns)
        return k.collective(name, CollectiveKind.ALL_GATHER, self.groups.tensor, whole, after=[x])

    def scatter_columns(self, k: Kernels, name: str, y: Value, columns: int) -> Value:
        """The sum over tensor ranks of rows of another width."""
        if self.layout.tp == 1:
            return y
        sp = self.layout.has_sequence_parallel
        kind = CollectiveKind.REDUCE_SCATTER if sp else CollectiveKind.ALL_REDUCE
        whole = self.value(self.tokens, columns)
        return k.collective(f"{name}.{self.scatter_name}", kind, self.groups.tensor, whole, after=[y])

    # --- linear layers

    def quantized(self, k: Kernels, name: str, tensor: Tensor, x: Value, element: str) -> Value:
        """The operand of a product in its format, once more transposed for the gradient of weights."""
        if element == self.precision.compute:
            return x
        copies = 2 if self.trains_weights and not self.serves else 1
        if copies == 1 or not self.precision.by_row:
            return self._converted(k, name, tensor, x, [Tensor(tensor.shape, element)] * copies)
        first = self._converted(k, name, tensor, x, [Tensor(tensor.shape, element)])
        self._converted(k, f"{name}.transposed", tensor, x, [Tensor(tensor.shape, element)])
        return first

    def _converted(self, k: Kernels, name: str, tensor: Tensor, x: Value, narrow: Sequence[Tensor]) -> Value:
        after = [x]
        if self.precision.looks_first and not self.serves:
            after.append(k.vector(f"{name}.absmax", "absmax", [tensor], [_SCALE], after=[x]))
        return k.vector(f"{name}.quantize", "quantize", [tensor], narrow, after=after)

    def _matrix(self, k: Kernels, name: str, layer: Linear, x: Value, element: str) -> list[Value]:
        """The matrix of a layer in the format of products, where it is converted at each use: Megatron-Core
        converts it when it is updated.
        """
        converts = element != self.precision.compute and self.training.style != "megatron"
        if not converts or self.serves or not self.trains_weights:
            return []
        lead = (layer.count,) if layer.count > 1 else ()
        shape = (*lead, layer.inputs, layer.outputs)
        whole = Tensor(shape, self.precision.compute)
        return [self._converted(k, f"{name}.matrix", whole, x, [Tensor(shape, element)])]

    def linear(self, k: Kernels, layer: Linear, x: Value, port: str = "") -> Value:
        """``x`` times the matrix, and through adapters where it has some."""
        element = self._format(layer)
        narrow = self.quantized(k, layer.name, self._of(layer, layer.inputs), x, element)
        matrix = self._matrix(k, layer.name, layer, x, element)
        y = k.product(
            layer.name,
            (layer.rows, layer.outputs, layer.inputs),
            left=element,
            result=self.precision.compute,
            batch=layer.count,
            after=[narrow, *matrix],
            port=port,
        )
        return self._adapted(k, layer, x, y, port) if layer.adapter else y

    def _of(self, layer: Linear, columns: int) -> Tensor:
        lead = (layer.count,) if layer.count > 1 else ()
        return Tensor((*lead, layer.rows, columns), self.precision.compute)

    def _adapted(self, k: Kernels, layer: Linear, x: Value, y: Value, port: str) -> Value:
        rank, name = layer.adapter, f"{layer.name}.lora"
        down = self._small(k, layer, f"{name}_a", (layer.rows, rank, layer.inputs), [x])
        up = self._small(k, layer, f"{name}_b", (layer.rows, layer.outputs, rank), [down])
        out = self._of(layer, layer.outputs)
        return k.vector(f"{name}_add", "add", [out, out], [out], after=[y, up], port=port)

    def _small(
        self, k: Kernels, layer: Linear, name: str, sizes: tuple[int, int, int], after: Sequence[Value]
    ) -> int:
        compute = self.precision.compute
        return k.product(name, sizes, left=compute, result=compute, batch=layer.count, after=after)

    def linear_backward(
        self, k: Kernels, layer: Linear, grad: Value, x: Value, gathered: Value | None = None
    ) -> Value:
        """The gradient of the input; that of the weights is made beside or later. ``x`` is the input of the
        product, ``gathered`` where it had to be gathered again.
        """
        element, compute = self._format(layer), self.precision.compute
        narrow = self.quantized(k, f"{layer.name}.grad", self._of(layer, layer.outputs), grad, element)
        matrix = self._matrix(k, f"{layer.name}.dgrad", layer, grad, element)
        back = k.product(
            f"{layer.name}.dgrad", (layer.rows, layer.inputs, layer.outputs),
            left=element, result=compute, batch=layer.count, after=[narrow, *matrix],
        )  # fmt: skip
        if self.trains_weights:
            self._weights(k, layer, narrow, x if gathered is None else gathered, element)
            return back
        if not layer.adapter:
            return back
        return self._adapters_backward(k, layer, grad, x if gathered is None else gathered, back)

    def _weights(self, k: Kernels, layer: Linear, grad: Value, x: Value, element: str) -> None:
        """Accumulate the gradient of a matrix, now or in a pass of its own."""
        port = f"{k.module}.{layer.name}.grad"
        k.name_port(port, grad)
        source = k.named(x, f"{k.module}.{layer.name}.input")
        accumulates = self.training.style == "megatron" and not self.training.pure_16bit

        def make(later: Kernels) -> object:
            node = later.product(
                f"{layer.name}.wgrad",
                (layer.inputs, layer.outputs, layer.rows),
                left=element,
                result=self.precision.gradient if accumulates else self.precision.compute,
                batch=layer.count,
                accumulate=accumulates,
                in_place=True,
                after=[f"backward:{port}", source],
                port=f"{port}.weights",
            )
            later.made.append(node)
            return node

        self.later(k, make)

    def later(self, k: Kernels, make: _Deferred) -> None:
        """Run what makes gradients of weights now, or leave it to a pass of its own."""
        if self.deferred is None:
            make(k)
            return
        module = k.module

        def there(kernels: Kernels) -> object:
            kernels.module = module
            return make(kernels)

        self.deferred.append(there)

    def _adapters_backward(self, k: Kernels, layer: Linear, grad: Value, x: Value, back: Value) -> Value:
        """Gradients of the input through both adapters; those of the adapters are made beside or later."""
        rank, rows, name = layer.adapter, layer.rows, f"{layer.name}.lora"
        inner = self._small(k, layer, f"{name}_b.dgrad", (rows, rank, layer.outputs), [grad])
        outer_grad, inner_grad, source = (
            k.named(value, f"{k.module}.{name}.{port}")
            for value, port in ((grad, "grad"), (inner, "inner_grad"), (x, "input"))
        )

        def make(later: Kernels) -> object:
            later.made += [
                self._small(later, layer, f"{name}_{which}.wgrad", sizes, [read, source])
                for which, sizes, read in (
                    ("b", (rank, layer.outputs, rows), outer_grad),
                    ("a", (layer.inputs, rank, rows), inner_grad),
                )
            ]
            return later.made

        self.later(k, make)
        through = self._small(k, layer, f"{name}_a.dgrad", (rows, layer.inputs, rank), [inner])
        out = self._of(layer, layer.inputs)
        return k.vector(f"{name}_add.backward", "add", [out, out], [out], after=[back, through])

    # --- linear layers whose matrices tensor ranks share

    @property
    def _pipelines(self) -> bool:
        return self.training.overlap.tensor and self.layout.has_sequence_parallel and self.trains_weights

    def column(self, k: Kernels, layer: Linear, x: Value, kept: str, port: str = "") -> Value:
        """A column-parallel layer of the rows ``x``; what the rank keeps of them is the port ``kept``."""
        k.name_port(kept, x)
        if self._pipelines:
            return self._gathering(k, layer, "", x, port)
        return self.linear(k, layer, self.gather(k, f"{layer.name}.all_gather", x), port)

    def column_backward(self, k: Kernels, layer: Linear, grad: Value, kept: str) -> Value:
        """The gradient of a column-parallel layer's rows. Its input is gathered once more for that of the
        weights, beside the product for that of the input.
        """
        again: Value | None = None
        if self.layout.has_sequence_parallel and self.learns(layer):
            again = self.gather(k, f"{layer.name}.regather", kept, control=[grad])
        if self._pipelines:
            self._weights(k, layer, grad, kept if again is None else again, self._format(layer))
            return self._scattering(k, layer, ".dgrad", grad)
        back = self.linear_backward(k, layer, grad, kept, again)
        return self.scatter(k, f"{layer.name}.dgrad.{self.scatter_name}", back)

    def row(self, k: Kernels, layer: Linear, x: Value) -> Value:
        """A row-parallel layer, whose results tensor ranks add up."""
        if self._pipelines:
            return self._scattering(k, layer, "", x)
        return self.scatter(k, f"{layer.name}.{self.scatter_name}", self.linear(k, layer, x))

    def row_backward(self, k: Kernels, layer: Linear, grad: Value, x: Value) -> Value:
        """The gradient of a row-parallel layer's input ``x``."""
        if self._pipelines:
            back = self._gathering(k, layer, ".dgrad", grad, "")
            self._weights(k, layer, back, x, self._format(layer))
            return back
        return self.linear_backward(k, layer, self.gather(k, f"{layer.name}.grad.all_gather", grad), x)

    # Pipelined as Transformer Engine's user buffers do it: pieces of rows go round a ring of the tensor
    # ranks, and each is multiplied while the next is on its way.

    def _slices(self, layer: Linear, suffix: str) -> tuple[tuple[int, int, int], str]:
        """Sizes of the product of one piece, backward with inputs and outputs in turn; its element type."""
        rows = layer.rows // self.layout.tp
        sizes = (rows, layer.inputs, layer.outputs) if suffix else (rows, layer.outputs, layer.inputs)
        return sizes, self._format(layer)

    def _gathering(self, k: Kernels, layer: Linear, suffix: str, x: Value, port: str) -> Value:
        sizes, element = self._slices(layer, suffix)
        ring = self.groups.tensor_ring
        piece = self.value(sizes[0], sizes[2])
        sent, done = self.quantized(k, f"{layer.name}{suffix}", piece, x, element), -1
        matrix = self._matrix(k, f"{layer.name}{suffix}", layer, x, element)
        for step in range(self.layout.tp):
            name = f"{layer.name}{suffix}.{step}"
            last = port if step == self.layout.tp - 1 else ""
            done = k.product(
                name,
                sizes,
                left=element,
                result=self.precision.compute,
                after=[sent, done, *matrix],
                port=last,
            )
            if not last and step < self.layout.tp - 1:
                sent = k.permute(f"{name}.ring", ring, Tensor(piece.shape, element), after=[sent])
        return done

    def _scattering(self, k: Kernels, layer: Linear, suffix: str, x: Value) -> Value:
        sizes, element = self._slices(layer, suffix)
        ring = self.groups.tensor_ring
        whole = self.value(layer.rows, sizes[2])
        narrow = self.quantized(k, f"{layer.name}{suffix}", whole, x, element)
        narrows = [narrow, *self._matrix(k, f"{layer.name}{suffix}", layer, x, element)]
        piece = self.value(sizes[0], sizes[1])
        moved: Value = -1
        for step in range(self.layout.tp):
            name = f"{layer.name}{suffix}.{step}"
            made = k.product(name, sizes, left=element, result=self.precision.compute, after=narrows)
            if step:
                made = k.vector(f"{name}.add", "add", [piece, piece], [piece], after=[made, moved])
            if step == self.layout.tp - 1:
                return made
            moved = k.permute(f"{name}.ring", ring, piece, after=[made])
        return moved

    def _format(self, layer: Linear) -> str:
        return layer.format or self.precision.matmul

    def collective(
        self, k: Kernels, name: str, kind: CollectiveKind, groups: StridedGroups, *, of: Tensor, x: Value
    ) -> Value:
        """A collective of a tensor where there is more than one rank, else its input."""
        return x if groups.group_size == 1 else k.collective(name, kind, groups, of, after=[x])
