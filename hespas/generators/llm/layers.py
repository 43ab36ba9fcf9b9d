"""Kernels of a model on one rank: embedding, layers block by block, head and loss, and the optimizer step.

Ports are named ``<layer>.<block>.<value>``; backward kernels read forward values by them. Values that
:class:`~hespas.generators.llm.settings.Recompute` covers are recomputed in the backward pass before they are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hespas.generators.llm.attention import (
    backward_attention,
    forward_attention,
    latent_up,
    queries_and_keys,
    recompute_core,
    recompute_exchange,
    unsaved_keys,
)
from hespas.generators.llm.feedforward import (
    activation,
    backward_experts,
    backward_mlp,
    expert_activation,
    forward_experts,
    forward_mlp,
    unsaved_half,
)
from hespas.generators.llm.kernels import KernelWriter, TensorSpec, Value
from hespas.generators.llm.mamba import backward_mamba, forward_mamba
from hespas.generators.llm.model import BLOCK_NAMES, Attention, Block, Experts, LatentAttention, Mamba, Mlp
from hespas.generators.llm.rank import LinearLayer, ModelRank
from hespas.generators.llm.settings import MODULES
from hespas.generators.llm.weights import RankWeights, copied_embedding
from hespas.graph import CollectiveKind, OpClass, Resource
from hespas.graph.groups import ExplicitGroups

__all__ = ["ModelEnds", "backward_layer", "forward_layer"]

_ROW = 4096
"""Columns of the flat tensors that the optimizer's kernels update."""


@dataclass(frozen=True)
class ModelEnds:
    """Writer of the kernels of the first and the last pipeline stage: embedding, head and loss, optimizer."""

    rank: ModelRank

    @property
    def _columns(self) -> int:
        """Return the rows of the embedding table that a rank holds."""
        return -(-self.rank.model.vocab // self.rank.layout.tp)

    def embed(self, k: KernelWriter) -> Value:
        """Add the embedding lookup that starts the residual stream."""
        r = self.rank
        k.module = "embedding"
        table, tokens = r.value(self._columns, r.hidden), TensorSpec((r.tokens,), "i64")
        x = k.vector("lookup", "embedding", [tokens, table], [r.whole], port="tokens")
        if r.model.positions == "learned":
            x = k.vector("positions", "add", [r.whole, r.whole], [r.whole], after=[x])
        return r.scatter(k, r.scatter_name, x)

    def embed_backward(self, k: KernelWriter, grad: Value, port: str = "embedding.grad") -> Value:
        """Add the gradient of the embedding table, and return the gathered gradient of the looked-up rows
        (``grad`` itself if no weights are trained). Other passes refer to that gradient by the name ``port``.
        """
        r = self.rank
        if not r.trains_weights:
            return grad
        k.module = "embedding"
        whole = r.gather(k, "grad.all_gather", grad)
        k.name_port(port, whole)

        def make(later: KernelWriter) -> object:
            return later.vector(
                "lookup.wgrad",
                "embedding_backward",
                [r.whole],
                [r.whole],
                after=[f"backward:{port}"],
                in_place=True,
            )

        r.run_or_defer(k, make)
        return whole

    def _head(self) -> LinearLayer:
        """Return the output head. Its collectives are not pipelined: it is not a layer of Transformer Engine
        in Megatron-Core, and torchtitan compiles only the layers before it.
        """
        r = self.rank
        return LinearLayer(
            name="head", inputs=r.hidden, outputs=self._columns, rows=r.tokens, format=r.precision.head,
            pipelined=False,
        )  # fmt: skip

    def loss(self, k: KernelWriter, x: Value) -> Value:
        """Add the last norm, the head, and the cross entropy; the vocabulary is sharded over tensor-parallel
        ranks.
        """
        r = self.rank
        key = (
            f"loss{k.count('loss')}"  # one name for each loss: of the next token, of the token after it, ...
        )
        k.module = key
        k.name_port(f"{key}.input", x)
        normed = r.norm(k, "norm", x, f"{key}.norm")
        logits = r.column(k, self._head(), normed, f"{key}.head_input", f"{key}.logits")
        scores = TensorSpec((r.tokens, self._columns), r.precision.compute)
        row = TensorSpec((r.tokens,), "f32")
        if r.layout.tp == 1:
            return k.vector(
                "cross_entropy", "cross_entropy", [scores], [row], after=[logits], port=f"{key}.loss"
            )
        largest = k.vector("max", "norm", [scores], [row], after=[logits])
        largest = k.collective(
            "max.all_reduce", CollectiveKind.ALL_REDUCE, r.groups.tensor, row, after=[largest]
        )
        sums = k.vector("cross_entropy", "cross_entropy", [scores], [row], after=[largest, logits])
        target = k.collective(
            "target.all_reduce", CollectiveKind.ALL_REDUCE, r.groups.tensor, row, after=[sums]
        )
        return k.collective(
            "sum.all_reduce",
            CollectiveKind.ALL_REDUCE,
            r.groups.tensor,
            row,
            after=[target],
            port=f"{key}.loss",
        )

    def loss_backward(self, k: KernelWriter, grad: Value = -1) -> Value:
        """Add the backward pass of the loss, the head and the norm before it. Each call takes the next loss,
        the last one first. Return the gradient of the hidden stream.

        ``grad`` is a gradient of the same hidden stream, from a layer of multi-token prediction that reads it
        too (-1: none).
        """
        r = self.rank
        key = f"loss{r.model.mtp_layers - k.count('loss')}"
        k.module = key
        scores = TensorSpec((r.tokens, self._columns), r.precision.compute)
        inner = k.vector(
            "cross_entropy.backward",
            "cross_entropy",
            [scores],
            [scores],
            after=[f"{key}.logits", f"{key}.loss"],
        )
        back = r.column_backward(k, self._head(), inner, f"{key}.head_input")
        return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)

    def _mtp_projection(self) -> LinearLayer:
        r = self.rank
        return LinearLayer(name="mtp_proj", inputs=2 * r.hidden, outputs=r.hidden, rows=r.rows)

    def next_token(self, k: KernelWriter, number: int, x: Value) -> Value:
        """Add the start of a multi-token prediction layer: the hidden stream and the embedding are
        normalised, joined, and projected to the hidden width (arXiv 2412.19437, section 2.2).
        """
        r = self.rank
        x = k.sums.get(x, x)
        k.module = f"layers.{number}.mtp"
        k.name_port(f"mtp.{number}.input", x)
        embedded = self.embed(k)
        k.name_port(f"mtp.{number}.embedded", embedded)
        k.module = f"layers.{number}.mtp"
        one = r.norm(k, "hidden_norm", x, "")
        two = r.norm(k, "embedding_norm", embedded, "")
        both = r.value(r.rows, 2 * r.hidden)
        joined = k.vector("join", "copy", [both], [both], after=[one, two], port=f"mtp.{number}.joined")
        return r.linear(k, self._mtp_projection(), joined)

    def next_token_backward(self, k: KernelWriter, number: int, grad: Value) -> Value:
        """Add the backward pass of the multi-token prediction projection: the gradients of its hidden vector
        and its embedding.
        """
        r = self.rank
        module = k.module = f"layers.{number}.mtp"
        back = r.linear_backward(k, self._mtp_projection(), grad, f"mtp.{number}.joined")
        if r.trains_weights:
            two = r.norm_backward(k, "embedding_norm.backward", back, f"mtp.{number}.embedded", -1)
            self.embed_backward(k, two, f"mtp.{number}.embedding.grad")
            k.module = module
        return r.norm_backward(k, "hidden_norm.backward", back, f"mtp.{number}.input", -1)

    def shared_gradients(
        self, k: KernelWriter, stage: int, done: Sequence[Value], weights: RankWeights
    ) -> list[Value]:
        """Add all-reduces of the gradients of weights that several ranks hold. These are weights that
        tensor-parallel ranks replicate, and an embedding that the first and the last stage share.
        """
        r = self.rank
        nodes: list[Value] = []
        if weights.replicated:
            parts = TensorSpec((weights.replicated,), r.gradient)
            nodes.append(
                k.collective(
                    "replicated.all_reduce", CollectiveKind.ALL_REDUCE, r.groups.tensor, parts, after=done
                )
            )
        if not r.trains_weights:
            return nodes
        pp, copied = r.layout.pp, copied_embedding(r.model, r.layout)
        if copied and pp > 1 and stage in {0, pp - 1}:
            inner = r.layout.ranks // pp
            pairs = ExplicitGroups(tuple((rank, rank + (pp - 1) * inner) for rank in range(inner)))
            parts = TensorSpec((copied,), r.gradient)
            nodes.append(
                k.collective("embedding.all_reduce", CollectiveKind.ALL_REDUCE, pairs, parts, after=done)
            )
        return nodes

    def finish(
        self,
        k: KernelWriter,
        weights: RankWeights,
        reduced: Sequence[Value],
        regather: Callable[[KernelWriter, Value], None],
    ) -> None:
        """Add the end of the step: the norm of all gradients, the update (on the host if the optimizer state
        is there), and the gathers of updated weights.
        """
        r = self.rank
        layout = r.layout
        shards = layout.sharded if layout.zero else 1
        expert_shards = layout.expert_sharded if layout.zero else 1
        elements = -(-weights.dense // shards) + -(-weights.experts // expert_shards)
        k.module = "optimizer"
        if not elements:
            self._global_norm(k, reduced)
            return
        pure = r.training.pure_16bit
        flat = (-(-elements // _ROW), min(elements, _ROW))  # kernels go over all tensors at once
        gradient = TensorSpec(flat, r.gradient)
        after: list[Value] = list(reduced)
        if r.training.grad_norm:
            one = TensorSpec((1,), "f32")
            norm: list[Value] = [k.vector("grad_norm", "norm", [gradient], [one], after=after)]
            after = self._global_norm(k, norm)
        state = TensorSpec(flat, r.precision.compute if pure else "f32")
        copy = TensorSpec(flat, r.precision.compute)
        reads = [gradient, state, state] + ([] if pure else [state])
        writes = [state, state] + ([copy] if pure else [state, copy])
        arguments = reads + ([copy] if pure else []), writes
        if not r.training.optimizer_offload:
            regather(k, k.vector("adam", "adam", *arguments, after=after, in_place=True))
            return
        after.append(k.transfer("gradients.offload", gradient, stores=True, after=reduced))
        # A class without device kernels: the time of the host is unknown.
        node = k.node("adam", "cpu_adam", OpClass.CUSTOM, *arguments, after=after, in_place=True)
        k.builder.set(node, resource=int(Resource.HOST))
        new = copy if r.training.style == "megatron" else state
        regather(k, k.transfer("weights.reload", new, stores=False, after=[node], in_place=True))

    def _global_norm(self, k: KernelWriter, after: Sequence[Value]) -> list[Value]:
        """Add the sum of the gradient norm over all ranks, including stages without trained weights."""
        r = self.rank
        if not r.training.grad_norm or r.layout.ranks == 1:
            return list(after)
        one, all_ranks = TensorSpec((1,), "f32"), r.groups.everyone
        return [k.collective("grad_norm.all_reduce", CollectiveKind.ALL_REDUCE, all_ranks, one, after=after)]


@contextmanager
def _recomputing(r: ModelRank, k: KernelWriter, grad: Value) -> Generator[None]:
    """Return a context in which forward kernels are written into the backward pass to recompute values. Nodes
    that are written later read the recomputed values.

    PyTorch recomputes a layer when the gradient ``grad`` of its result has been computed or received, and a
    stream runs kernels in the order of their launches. XLA schedules kernels by their data alone.
    """
    k.again, k.in_order = True, r.training.style != "maxtext"
    if k.in_order and not isinstance(grad, str):
        k.follow.append(grad)
    yield
    k.again = k.in_order = False


def _forward(r: ModelRank, k: KernelWriter, block: Block, key: str, x: Value) -> Value:
    match block:
        case Attention() | LatentAttention():
            return forward_attention(r, k, block, key, x)
        case Mlp():
            return forward_mlp(r, k, block, key, x)
        case Experts():
            return forward_experts(r, k, block, key, x)
        case Mamba():
            return forward_mamba(r, k, block, key, x)


def forward_layer(r: ModelRank, k: KernelWriter, layer: tuple[Block, ...], number: int, x: Value) -> Value:
    """Add the blocks of layer ``number``; ``x`` and the result are the residual stream before and after
    it.
    """
    for position, block in enumerate(layer):
        key = f"{number}.{position}"
        k.module = f"layers.{number}.{BLOCK_NAMES[type(block)]}"
        k.name_port(f"{key}.input", x)
        x = _forward(r, k, block, key, x)
    return x


def backward_layer(
    r: ModelRank, k: KernelWriter, layer: tuple[Block, ...], number: int, grad: Value, *, index: int
) -> Value:
    """Add the backward pass of layer ``number``, and return the gradient of its input.

    ``index`` is the position of the layer in its pipeline stage.
    """
    covers = r.training.recompute.covers
    whole = r.training.recompute.whole(index)
    if whole:
        with _recomputing(r, k, grad):
            forward_layer(r, k, layer, number, f"{number}.0.input")
    for position, block in reversed(list(enumerate(layer))):
        key = f"{number}.{position}"
        k.module = f"layers.{number}.{BLOCK_NAMES[type(block)]}"
        if not whole:
            with _recomputing(r, k, grad):
                _recompute(r, k, block, key, {module for module in MODULES if covers(module, index)})
        match block:
            case Attention() | LatentAttention():
                grad = backward_attention(r, k, block, key, grad)
            case Mlp():
                grad = backward_mlp(r, k, block, key, grad)
            case Experts():
                grad = backward_experts(r, k, block, key, grad)
            case Mamba():
                grad = backward_mamba(r, k, block, key, grad)
    return grad


def _recompute(r: ModelRank, k: KernelWriter, block: Block, key: str, covered: set[str]) -> None:
    """Add the recomputation of forward values that the block's backward pass reads and that were not
    saved.
    """
    if ("mlp" in covered and isinstance(block, Mlp)) or ("moe" in covered and isinstance(block, Experts)):
        _forward(r, k, block, key, f"{key}.input")
        return
    if "layernorm" in covered:
        normed = r.norm(k, "norm", f"{key}.input", f"{key}.norm")
        for port in ("qkv_input", "fc1_input", "in_input", "shared.fc1_input"):
            k.name_port(f"{key}.{port}", normed)
    match block:
        case Attention() if r.training.recompute.per_operation and "qkv" in covered:
            recompute_exchange(r, k, block, key, unsaved_keys(r, k, block, key))
        case Attention() | LatentAttention():
            if "qkv" in covered:
                recompute_exchange(r, k, block, key, queries_and_keys(r, k, block, key, f"{key}.norm"))
            elif "mla_up_proj" in covered and isinstance(block, LatentAttention):
                recompute_exchange(r, k, block, key, latent_up(r, k, block, key, f"{key}.latent"))
            if "core_attn" in covered:
                recompute_core(r, k, block, key)
        case Mlp() if "mlp_act" in covered:
            by_operation = r.training.recompute.per_operation
            activation(r, k, block, key, unsaved_half(r, k, block, key) if by_operation else f"{key}.fc1")
        case Experts() if "moe_act" in covered:
            expert_activation(r, k, block, key, f"{key}.fc1")
        case _:
            pass
