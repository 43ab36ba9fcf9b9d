"""Sizes on one rank, and the kernels that blocks share: norms, parallel linear layers and their collectives.

Inside tensor-parallel regions a micro-batch has ``tokens`` tokens. Outside, a rank has ``rows`` of them: with
sequence parallelism one part in ``tp``, otherwise all (arXiv 2205.05198). A column-parallel product follows
an all-gather of its input, and a row-parallel product precedes a reduce-scatter of its output. Without
sequence parallelism the all-gather is omitted, and the reduce-scatter is an all-reduce. The backward pass
mirrors this, and gathers the input once more for the gradient of weights.

Methods that take a ``KernelWriter`` add kernels to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hespas.generators.llm.kernels import KernelWriter, TensorSpec, Value
from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.model import Attention, Block, Experts, LatentAttention, Mlp, Model
from hespas.generators.llm.settings import ModelPrecision, Training
from hespas.graph import CollectiveKind, StridedGroups

__all__ = ["LinearLayer", "ModelRank", "keeps_weights"]

_Deferred = Callable[[KernelWriter], object]
_SCALE = TensorSpec((1,), "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """Linear layer on one rank: a matmul of ``rows`` input rows with a matrix of ``inputs`` x ``outputs``.
    ``count`` such matmuls are batched (experts).

    ``format`` is the element type of the operands (empty: the default of the run), ``adapter`` the rank of
    the LoRA adapters (0: none). ``pipelined`` is False if its collectives never overlap pieces of the matmul.
    """

    name: str
    inputs: int
    outputs: int
    rows: int
    count: int = 1
    format: str = ""
    adapter: int = 0
    pipelined: bool = True


def keeps_weights(layout: Layout, training: Training) -> bool:
    """Return True if sharded weights are gathered once a step, and gradients are reduced once at its end:
    PyTorch's FSDP in a pipeline (``torch.distributed.pipelining``).
    """
    return layout.zero == 3 and layout.pp > 1 and training.style == "torchtitan"


@dataclass(frozen=True)
class ModelRank:
    """Sizes and common kernels of a rank of the job.

    ``deferred`` collects the kernels of weight gradients for a separate pass, as in the zero bubble schedule
    (None: they run at once). ``batch_tokens`` is the number of tokens of a pass that is not a training
    micro-batch. ``serves`` is True if the job has only forward passes.
    """

    model: Model
    layout: Layout
    training: Training
    deferred: list[_Deferred] | None = None
    batch_tokens: int = 0
    serves: bool = False

    @cached_property
    def groups(self) -> RankGroups:
        """Groups of the layout."""
        return RankGroups(self.layout)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this context-parallel rank."""
        return self.batch_tokens or self.training.micro_batch * self.training.seq // self.layout.cp

    @cached_property
    def rows(self) -> int:
        """Tokens on a rank outside tensor-parallel regions."""
        return self.tokens // (self.layout.tp if self.layout.has_sequence_parallel else 1)

    @cached_property
    def expert_rows(self) -> int:
        """Tokens that a rank routes to experts. Each tensor-parallel rank routes a different part of the
        tokens.
        """
        return self.tokens // self.layout.tp

    def routed(self, block: Experts) -> int:
        """Return the number of token copies that a rank sends to experts in a micro-batch."""
        return round(self.expert_rows * block.topk * self.training.dispatch_ratio)

    def received(self, block: Experts) -> int:
        """Return the number of token copies that the experts of the busiest rank process in a micro-batch. If
        tensor-parallel ranks share an expert, the copies that they gather from each other are included.
        """
        return round(self.expert_rows * block.topk * self.training.expert_load * self.layout.etp)

    @property
    def keeps_weights(self) -> bool:
        """True if :func:`keeps_weights` is."""
        return keeps_weights(self.layout, self.training)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.model.hidden

    @property
    def precision(self) -> ModelPrecision:
        """Number formats."""
        return self.training.precision

    @property
    def trains_weights(self) -> bool:
        """True if the weight matrices are trained; False if only adapters are."""
        return self.training.lora_rank == 0

    def adapter(self, block: Block) -> int:
        """Return the rank of the adapters of a block's linear layers; 0 without adapters."""
        attention = isinstance(block, Attention | LatentAttention)
        dense = isinstance(block, Mlp) and not self.training.lora_attention_only
        return self.training.lora_rank if attention or dense else 0

    def learns(self, layer: LinearLayer) -> bool:
        """Return True if the backward pass of a layer computes gradients of its weights or adapters."""
        return self.trains_weights or layer.adapter > 0

    @property
    def gradient(self) -> str:
        """Element type of accumulated gradients."""
        return self.precision.compute if self.training.pure_16bit else self.precision.gradient

    @cached_property
    def stream(self) -> TensorSpec:
        """Tensor of the residual stream on this rank, outside tensor-parallel regions."""
        return TensorSpec((self.rows, self.hidden), self.precision.compute)

    @cached_property
    def whole(self) -> TensorSpec:
        """Tensor of the residual stream inside tensor-parallel regions, with all tokens."""
        return TensorSpec((self.tokens, self.hidden), self.precision.compute)

    def value(self, rows: int, columns: int) -> TensorSpec:
        """Return the tensor of a matrix in the element type of activations."""
        return TensorSpec((rows, columns), self.precision.compute)

    def norm(self, k: KernelWriter, name: str, x: Value, port: str) -> Value:
        """Add a norm of the residual stream. If a block's result has yet to be added to the stream, one
        kernel does both.
        """
        kernel, one = f"{self.model.norm}_norm", [self.stream]
        if x not in k.pending:
            return k.vector(name, kernel, one, one, after=[x], port=port)
        before = k.pending.pop(x)
        node = k.vector(name, f"add_{kernel}", one * 2, one * 2, after=[before, x], port=port)
        k.sums[x] = node
        k.name_port(port.removesuffix("norm") + "input", node)
        return node

    def norm_backward(self, k: KernelWriter, name: str, grad: Value, x: Value, skip: Value) -> Value:
        """Add the backward pass of a norm, which also adds the gradient ``skip`` of the residual
        connection.
        """
        reads = [self.stream, self.stream, self.stream]
        return k.vector(name, f"{self.model.norm}_norm_backward", reads, [self.stream], after=[grad, x, skip])

    def residual(self, k: KernelWriter, x: Value, y: Value, name: str = "residual") -> Value:
        """Add the result ``y`` of a block to the residual stream ``x``, and return the new stream. The
        addition is a separate kernel, or a part of the next norm if a compiler fuses elementwise operations.
        """
        x = k.sums.get(x, x)
        if self.training.style == "megatron":
            return k.vector(name, "add", [self.stream, self.stream], [self.stream], after=[x, y])
        k.pending[y] = x
        return y

    def add_pending(self, k: KernelWriter, x: Value) -> Value:
        """Add the kernel for a residual addition that was deferred to be fused into a norm, but has no norm
        after it.
        """
        if x not in k.pending:
            return x
        return k.vector("residual", "add", [self.stream] * 2, [self.stream], after=[k.pending.pop(x), x])

    def add_block(self, k: KernelWriter, key: str, x: Value, y: Value) -> Value:
        """Add the result of a block to the residual stream. Models with post-norms normalise the result
        first.
        """
        if self.model.post_norms:
            k.name_port(f"{key}.post_input", y)
            y = self.norm(k, "post_norm", y, "")
        return self.residual(k, x, y)

    def add_block_backward(self, k: KernelWriter, key: str, grad: Value) -> Value:
        """Add the backward pass of :meth:`add_block`, and return the gradient of the block's result."""
        if self.model.post_norms:
            return self.norm_backward(k, "post_norm.backward", grad, f"{key}.post_input", -1)
        return grad

    @property
    def scatter_name(self) -> str:
        """Name of the collective that sums results over tensor-parallel ranks."""
        return "reduce_scatter" if self.layout.has_sequence_parallel else "all_reduce"

    def gather(
        self, k: KernelWriter, name: str, x: Value, element: str = "", control: Sequence[Value] = ()
    ) -> Value:
        """Add the all-gather of rows over tensor-parallel ranks. Without sequence parallelism return
        ``x``. ``element`` is the element type of the rows (empty: the type of activations).
        """
        if not self.layout.has_sequence_parallel:
            return x
        whole = TensorSpec(self.whole.shape, element or self.precision.compute)
        before = [node for node in control if not isinstance(node, str)]
        groups = self.groups.tensor
        x = k.collective(name, CollectiveKind.ALL_GATHER, groups, whole, after=[x], control=before)
        return self._in_order(k, name, x, whole)

    def scatter(self, k: KernelWriter, name: str, y: Value) -> Value:
        """Add the sum over tensor-parallel ranks: a reduce-scatter with sequence parallelism, otherwise an
        all-reduce.
        """
        if self.layout.tp == 1:
            return y
        kind = (
            CollectiveKind.REDUCE_SCATTER if self.layout.has_sequence_parallel else CollectiveKind.ALL_REDUCE
        )
        if self.layout.has_sequence_parallel:
            y = self._in_order(k, name, y, self.whole)
        control = [k.part.tail] if self._waits_for_tensor else []
        return k.collective(name, kind, self.groups.tensor, self.whole, after=[y], control=control)

    def _in_order(self, k: KernelWriter, name: str, x: Value, tensor: TensorSpec) -> Value:
        """Add the copy between the order of ranks, in which collectives gather and scatter rows, and the
        order of sequences, and return the copied rows. With one sequence both orders are equal.

        A DTensor has the sequences as its first dimension, and splits the second one
        (``torch.distributed._functional_collectives``: ``cat`` of chunks). Other frameworks have the tokens
        of all sequences as one dimension, and copy nothing.
        """
        if self.training.style != "torchtitan" or self.training.micro_batch == 1:
            return x
        kernel = "copy" if self.training.compiled else "cat"
        return k.vector(f"{name}.cat", kernel, [tensor], [tensor], after=[x], control=[k.part.tail])

    @property
    def _waits_for_tensor(self) -> bool:
        """Return True if tensor-parallel collectives of the backward pass overlap no matmul (DTensor waits
        for each of them).
        """
        return self.training.style == "torchtitan" or not self.training.overlap.tensor_backward

    def gather_columns(self, k: KernelWriter, name: str, x: Value, columns: int) -> Value:
        """Add the all-gather over tensor-parallel ranks of rows that have another width than the residual
        stream.
        """
        if not self.layout.has_sequence_parallel:
            return x
        whole = self.value(self.tokens, columns)
        return k.collective(name, CollectiveKind.ALL_GATHER, self.groups.tensor, whole, after=[x])

    def scatter_columns(self, k: KernelWriter, name: str, y: Value, columns: int) -> Value:
        """Add the sum over tensor-parallel ranks of rows that have another width than the residual stream."""
        if self.layout.tp == 1:
            return y
        sp = self.layout.has_sequence_parallel
        kind = CollectiveKind.REDUCE_SCATTER if sp else CollectiveKind.ALL_REDUCE
        whole = self.value(self.tokens, columns)
        control = [k.part.tail] if self._waits_for_tensor else []
        name = f"{name}.{self.scatter_name}"
        return k.collective(name, kind, self.groups.tensor, whole, after=[y], control=control)

    def quantize(self, k: KernelWriter, name: str, tensor: TensorSpec, x: Value, element: str) -> Value:
        """Add the conversion of an operand to the format of the matmul, and return the converted operand. If
        weights are trained, the kernel also makes a transposed copy for the gradient of the weights.
        """
        if element == self.precision.compute:
            return x
        copies = 2 if self.trains_weights and not self.serves else 1
        if copies == 1 or not self.precision.by_row:
            return self._convert(k, name, tensor, x, [TensorSpec(tensor.shape, element)] * copies)
        first = self._convert(k, name, tensor, x, [TensorSpec(tensor.shape, element)])
        self._convert(k, f"{name}.transposed", tensor, x, [TensorSpec(tensor.shape, element)])
        return first

    def _convert(
        self, k: KernelWriter, name: str, tensor: TensorSpec, x: Value, narrow: Sequence[TensorSpec]
    ) -> Value:
        after = [x]
        if self.precision.looks_first and not self.serves:
            after.append(k.vector(f"{name}.absmax", "absmax", [tensor], [_SCALE], after=[x]))
        return k.vector(f"{name}.quantize", "quantize", [tensor], narrow, after=after)

    def _matrix(self, k: KernelWriter, name: str, layer: LinearLayer, x: Value, element: str) -> list[Value]:
        """Add the conversion of a layer's matrix to the format of the matmul, if the framework converts it at
        each use. Megatron-Core converts a matrix once, when it is updated.
        """
        converts = element != self.precision.compute and self.training.style != "megatron"
        if not converts or self.serves or not self.trains_weights:
            return []
        lead = (layer.count,) if layer.count > 1 else ()
        shape = (*lead, layer.inputs, layer.outputs)
        whole = TensorSpec(shape, self.precision.compute)
        return [self._convert(k, f"{name}.matrix", whole, x, [TensorSpec(shape, element)])]

    def linear(
        self, k: KernelWriter, layer: LinearLayer, x: Value, port: str = "", *, converted: bool = False
    ) -> Value:
        """Add the product of ``x`` and the layer's matrix, and the results of its adapters. ``converted`` is
        True if ``x`` has the format of the matmul.
        """
        element, narrow = self._format(layer), x
        if not converted:
            narrow = self.quantize(k, layer.name, self._operand(layer, layer.inputs), x, element)
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
        if not layer.adapter:
            return y
        name = f"{layer.name}.lora"
        down = self._adapter_product(k, layer, f"{name}_a", (layer.rows, layer.adapter, layer.inputs), [x])
        up = self._adapter_product(k, layer, f"{name}_b", (layer.rows, layer.outputs, layer.adapter), [down])
        out = self._operand(layer, layer.outputs)
        return k.vector(f"{name}_add", "add", [out, out], [out], after=[y, up], port=port)

    def _operand(self, layer: LinearLayer, columns: int) -> TensorSpec:
        lead = (layer.count,) if layer.count > 1 else ()
        return TensorSpec((*lead, layer.rows, columns), self.precision.compute)

    def _adapter_product(
        self,
        k: KernelWriter,
        layer: LinearLayer,
        name: str,
        sizes: tuple[int, int, int],
        after: Sequence[Value],
    ) -> int:
        compute = self.precision.compute
        return k.product(name, sizes, left=compute, result=compute, batch=layer.count, after=after)

    def linear_backward(
        self,
        k: KernelWriter,
        layer: LinearLayer,
        grad: Value,
        x: Value,
        gathered: Value | None = None,
        *,
        converted: bool = False,
    ) -> Value:
        """Add the gradient of the layer's input, and the gradient of its weights (at once or deferred).
        Return the gradient of the input.

        ``x`` is the input of the layer in the forward pass. ``gathered`` is the copy of this input that was
        gathered again for the backward pass, if any. ``converted`` is True if ``grad`` has the format of the
        matmul.
        """
        element, compute, narrow = self._format(layer), self.precision.compute, grad
        if not converted:
            narrow = self.quantize(
                k, f"{layer.name}.grad", self._operand(layer, layer.outputs), grad, element
            )
        matrix = self._matrix(k, f"{layer.name}.dgrad", layer, grad, element)
        back = k.product(
            f"{layer.name}.dgrad", (layer.rows, layer.inputs, layer.outputs),
            left=element, result=compute, batch=layer.count, after=[narrow, *matrix],
        )  # fmt: skip
        if self.trains_weights:
            self._weight_gradient(k, layer, narrow, x if gathered is None else gathered, element)
            return back
        if not layer.adapter:
            return back
        return self._adapters_backward(k, layer, grad, x if gathered is None else gathered, back)

    def _weight_gradient(
        self, k: KernelWriter, layer: LinearLayer, grad: Value, x: Value, element: str
    ) -> None:
        """Add the gradient of a matrix, at once or in a separate pass. In Megatron-Core the matmul adds its
        result to the accumulated gradient, unless training is in 16 bits only. Without fusion a separate
        kernel adds it.
        """
        port = f"{k.module}.{layer.name}.grad"
        k.name_port(port, grad)
        source = k.named(x, f"{k.module}.{layer.name}.input")
        accumulates = self.training.style == "megatron" and not self.training.pure_16bit
        is_fused = accumulates and self.training.fused_gradients

        def make(later: KernelWriter) -> object:
            node = later.product(
                f"{layer.name}.wgrad",
                (layer.inputs, layer.outputs, layer.rows),
                left=element,
                result=self.precision.gradient if is_fused else self.precision.compute,
                batch=layer.count,
                accumulate=is_fused,
                in_place=True,
                after=[f"backward:{port}", source],
                port=f"{port}.weights",
            )
            if accumulates and not is_fused:
                shape = (layer.count * layer.inputs, layer.outputs)
                made, summed = (TensorSpec(shape, dtype) for dtype in (self.precision.compute, self.gradient))
                node = later.vector(
                    f"{layer.name}.wgrad.add", "add", [made, summed], [summed], after=[node], in_place=True
                )
            later.made.append(node)
            return node

        self.run_or_defer(k, make)

    def run_or_defer(self, k: KernelWriter, make: _Deferred) -> None:
        """Write the kernels of a weight gradient now, or defer them to a separate pass (:attr:`deferred`)."""
        if self.deferred is None:
            make(k)
            return
        module = k.module

        def make_later(kernels: KernelWriter) -> object:
            kernels.module = module
            return make(kernels)

        self.deferred.append(make_later)

    def _adapters_backward(
        self, k: KernelWriter, layer: LinearLayer, grad: Value, x: Value, back: Value
    ) -> Value:
        """Add the backward pass of a layer's adapters: the gradient of the input, and the gradients of both
        adapter matrices (at once or deferred).
        """
        rank, rows, name = layer.adapter, layer.rows, f"{layer.name}.lora"
        inner = self._adapter_product(k, layer, f"{name}_b.dgrad", (rows, rank, layer.outputs), [grad])
        outer_grad, inner_grad, source = (
            k.named(value, f"{k.module}.{name}.{port}")
            for value, port in ((grad, "grad"), (inner, "inner_grad"), (x, "input"))
        )

        def make(later: KernelWriter) -> object:
            later.made += [
                self._adapter_product(later, layer, f"{name}_{letter}.wgrad", sizes, [grad_port, source])
                for letter, sizes, grad_port in (
                    ("b", (rank, layer.outputs, rows), outer_grad),
                    ("a", (layer.inputs, rank, rows), inner_grad),
                )
            ]
            return later.made

        self.run_or_defer(k, make)
        through = self._adapter_product(k, layer, f"{name}_a.dgrad", (rows, layer.inputs, rank), [inner])
        out = self._operand(layer, layer.inputs)
        return k.vector(f"{name}_add.backward", "add", [out, out], [out], after=[back, through])

    def _pipelines(self, layer: LinearLayer, *, gathers: bool) -> bool:
        """Return True if a tensor-parallel collective is pipelined with the matmul of a layer. Rows are
        divided into pieces, one per rank. A rank multiplies one piece while another one is transferred.
        ``gathers`` is True for an all-gather before the matmul, False for a reduce-scatter after it.

        The layers of Transformer Engine with user buffers pipeline both. PyTorch's compiler
        (``torch._inductor.fx_passes.micro_pipeline_tp``) pipelines an all-gather only if the matmul reads its
        result: scales by row are computed between them.
        """
        possible = self.training.overlap.tensor and self.layout.has_sequence_parallel and self.trains_weights
        converts = self.precision.by_row and self._format(layer) != self.precision.compute
        is_torch = self.training.style == "torchtitan"
        return possible and layer.pipelined and not (is_torch and gathers and converts)

    def _gathers_converted(self, layer: LinearLayer) -> bool:
        """Return True if rows are converted to the format of the matmul before they are gathered: torchtitan
        with one scale per tensor (``torchao.float8.float8_tensor_parallel``).
        """
        precision = self.precision
        one_scale = precision.looks_first and not precision.by_row and self._format(layer) == precision.matmul
        return self.training.style == "torchtitan" and self.layout.has_sequence_parallel and one_scale

    def column(self, k: KernelWriter, layer: LinearLayer, x: Value, saved: str, port: str = "") -> Value:
        """Add a column-parallel layer; ``x`` are the rows of this rank, which are saved for the backward pass
        as port ``saved``.

        The autograd of PyTorch reads the gathered rows. If a layer is recomputed, they have the port
        ``saved.gathered``, and are not gathered again.
        """
        k.name_port(saved, x)
        reads_gathered = k.again and self.training.style == "torchtitan"
        if not self._pipelines(layer, gathers=True):
            converted, element = self._gathers_converted(layer), self._format(layer)
            if converted:
                x = self.quantize(k, layer.name, self.stream, x, element)
            x = self.gather(k, f"{layer.name}.all_gather", x, element if converted else "")
            k.name_port(f"{saved}.gathered" if reads_gathered else "", x)
            return self.linear(k, layer, x, port, converted=converted)
        y = self._gather_pipelined(k, layer, "", x, port)
        if reads_gathered:
            rows = TensorSpec(self.whole.shape, self._format(layer))
            k.name_port(f"{saved}.gathered", self._in_order(k, f"{layer.name}.all_gather", y, rows))
        return y

    def column_backward(self, k: KernelWriter, layer: LinearLayer, grad: Value, saved: str) -> Value:
        """Add the backward pass of a column-parallel layer, and return the gradient of its input rows.

        The input is gathered again for the gradient of the weights, in parallel to the gradient of the input.
        PyTorch's compiler pipelines only a reduce-scatter of the result of one matmul, and the input of these
        layers has the sum of several gradients: of queries, keys and values, or of both gates.
        """
        again: Value | None = k.local.get(f"{saved}.gathered")
        if again is None and self.layout.has_sequence_parallel and self.learns(layer):
            again = self.gather(k, f"{layer.name}.regather", saved, control=[grad])
            if self._waits_for_tensor and not isinstance(again, str):
                k.follow.append(again)
        if self._pipelines(layer, gathers=False) and self.training.style != "torchtitan":
            self._weight_gradient(k, layer, grad, saved if again is None else again, self._format(layer))
            return self._scatter_pipelined(k, layer, ".dgrad", grad)
        back = self.linear_backward(k, layer, grad, saved, again)
        return self.scatter(k, f"{layer.name}.dgrad.{self.scatter_name}", back)

    def row(self, k: KernelWriter, layer: LinearLayer, x: Value) -> Value:
        """Add a row-parallel layer and the sum of its results over tensor-parallel ranks."""
        if self._pipelines(layer, gathers=False):
            return self._scatter_pipelined(k, layer, "", x)
        return self.scatter(k, f"{layer.name}.{self.scatter_name}", self.linear(k, layer, x))

    def row_backward(self, k: KernelWriter, layer: LinearLayer, grad: Value, x: Value) -> Value:
        """Add the backward pass of a row-parallel layer with input ``x``, and return the gradient of
        ``x``.
        """
        name = f"{layer.name}.grad.all_gather"
        if self._pipelines(layer, gathers=True):
            back = self._gather_pipelined(k, layer, ".dgrad", grad, "")
            gathered = self._in_order(k, name, back, TensorSpec(self.whole.shape, self._format(layer)))
            self._weight_gradient(k, layer, gathered, x, self._format(layer))
            return back
        converted, element = self._gathers_converted(layer), self._format(layer)
        if converted:
            grad = self.quantize(k, f"{layer.name}.grad", self.stream, grad, element)
        grad = self.gather(k, name, grad, element if converted else "")
        return self.linear_backward(k, layer, grad, x, converted=converted)

    def _piece(self, layer: LinearLayer, suffix: str) -> tuple[tuple[int, int, int], str]:
        """Return the (m, n, k) sizes of the matmul of one piece of a layer, and its element type. A piece is
        the rows of one tensor-parallel rank, if communication overlaps with matmuls. ``suffix`` is not empty
        for the backward pass, in which inputs and outputs are exchanged.
        """
        rows = layer.rows // self.layout.tp
        sizes = (rows, layer.inputs, layer.outputs) if suffix else (rows, layer.outputs, layer.inputs)
        return sizes, self._format(layer)

    def _gather_pipelined(
        self, k: KernelWriter, layer: LinearLayer, suffix: str, x: Value, port: str
    ) -> Value:
        """Add a matmul whose input rows are gathered piece by piece, and return its last piece. PyTorch first
        copies the rows of a rank to memory that its peers can read
        (``torch.distributed._symmetric_memory``).
        """
        sizes, element = self._piece(layer, suffix)
        ring = self.groups.tensor_ring
        piece = self.value(sizes[0], sizes[2])
        sent, done = self.quantize(k, f"{layer.name}{suffix}", piece, x, element), -1
        matrix = self._matrix(k, f"{layer.name}{suffix}", layer, x, element)
        if self.training.style == "torchtitan":
            narrow = [TensorSpec(piece.shape, element)]
            sent = done = k.vector(f"{layer.name}{suffix}.share", "copy", narrow, narrow, after=[sent])
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
                sent = k.permute(f"{name}.ring", ring, TensorSpec(piece.shape, element), after=[sent])
        return done

    def _scatter_pipelined(self, k: KernelWriter, layer: LinearLayer, suffix: str, x: Value) -> Value:
        """Add a matmul whose result is summed over ranks piece by piece, and return the piece of this rank.

        User buffers of Transformer Engine send partial sums around a ring. PyTorch reads the pieces of all
        peers, and then sums them in one kernel. It has two buffers for pieces: a matmul waits for the
        transfer of the last piece but one.
        """
        sizes, element = self._piece(layer, suffix)
        ring = self.groups.tensor_ring
        whole = self.value(layer.rows, sizes[2])
        narrow = self.quantize(k, f"{layer.name}{suffix}", whole, x, element)
        operands = [narrow, *self._matrix(k, f"{layer.name}{suffix}", layer, x, element)]
        piece = self.value(sizes[0], sizes[1])
        moved: Value = -1
        in_torch, received = self.training.style == "torchtitan", [-1, -1]
        for step in range(self.layout.tp):
            name = f"{layer.name}{suffix}.{step}"
            control = received[-2:-1] if in_torch else []
            made = k.product(
                name, sizes, left=element, result=self.precision.compute, after=operands, control=control
            )
            if in_torch:
                is_own = step == self.layout.tp - 1
                received.append(made if is_own else k.permute(f"{name}.ring", ring, piece, after=[made]))
                continue
            if step:
                made = k.vector(f"{name}.add", "add", [piece, piece], [piece], after=[made, moved])
            if step == self.layout.tp - 1:
                return made
            moved = k.permute(f"{name}.ring", ring, piece, after=[made])
        pieces = self.value(layer.rows, sizes[1])
        return k.vector(f"{layer.name}{suffix}.sum", "sum", [pieces], [piece], after=received)

    def _format(self, layer: LinearLayer) -> str:
        return layer.format or self.precision.matmul

    def collective(
        self,
        k: KernelWriter,
        name: str,
        kind: CollectiveKind,
        groups: StridedGroups,
        *,
        of: TensorSpec,
        x: Value,
    ) -> Value:
        """Add a collective on the tensor ``of``. With groups of one rank, add nothing and return ``x``.

        It starts after all kernels before it, also after the gradient of weights: PyTorch computes both
        gradients of a layer in one function, before it communicates. XLA waits only for ``x``.
        """
        if groups.group_size == 1:
            return x
        control = [] if self.training.style == "maxtext" else [k.part.tail]
        return k.collective(name, kind, groups, of, after=[x], control=control)
