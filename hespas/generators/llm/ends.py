"""What stands outside of layers: embedding, head and loss, further predictions, and the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hespas.generators.llm.kernels import Kernels, Tensor, Value
from hespas.generators.llm.rank import Linear, Rank
from hespas.generators.llm.weights import Weights, copied_embedding
from hespas.graph import CollectiveKind, OpClass, Resource
from hespas.graph.groups import ExplicitGroups

__all__ = ["Ends"]


_ROW = 4096


@dataclass(frozen=True)
class Ends:
    """Kernels of the first and the last stage."""

    rank: Rank

    @property
    def _columns(self) -> int:
        """Rows of the embedding on a rank."""
        return -(-self.rank.model.vocab // self.rank.layout.tp)

    # --- embedding

    def embed(self, k: Kernels) -> Value:
        """Tokens to the residual stream."""
        r = self.rank
        k.module = "embedding"
        table, tokens = r.value(self._columns, r.hidden), Tensor((r.tokens,), "i64")
        x = k.vector("lookup", "embedding", [tokens, table], [r.whole], port="tokens")
        if r.model.positions == "learned":
            x = k.vector("positions", "add", [r.whole, r.whole], [r.whole], after=[x])
        return r.scatter(k, r.scatter_name, x)

    def embed_backward(self, k: Kernels, grad: Value, port: str = "embedding.grad") -> Value:
        """The gradient of the embedding, from that of what was looked up, whose rows the port names."""
        r = self.rank
        if not r.trains_weights:
            return grad
        k.module = "embedding"
        whole = r.gather(k, "grad.all_gather", grad)
        k.name_port(port, whole)

        def make(later: Kernels) -> object:
            return later.vector(
                "lookup.wgrad",
                "embedding_backward",
                [r.whole],
                [r.whole],
                after=[f"backward:{port}"],
                in_place=True,
            )

        r.later(k, make)
        return whole

    # --- head and loss

    def _head(self) -> Linear:
        r = self.rank
        return Linear(
            name="head", inputs=r.hidden, outputs=self._columns, rows=r.tokens, format=r.precision.head
        )

    def loss(self, k: Kernels, x: Value) -> Value:
        """The last norm, the head, and the cross entropy over a vocabulary that tensor ranks share."""
        r = self.rank
        key = self._key(k)
        k.module = key
        k.name_port(f"{key}.input", x)
        normed = r.norm(k, "norm", x, f"{key}.norm")
        logits = r.column(k, self._head(), normed, f"{key}.head_input", f"{key}.logits")
        scores = Tensor((r.tokens, self._columns), r.precision.compute)
        row = Tensor((r.tokens,), "f32")
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

    def _key(self, k: Kernels) -> str:
        """A name for each loss of a pass: of the next token, of the one behind it, and so on."""
        return f"loss{k.count('loss')}"

    def loss_backward(self, k: Kernels, grad: Value = -1) -> Value:
        """The gradient of what entered the head; the last loss comes first. ``grad`` is that of what further
        predictions read of it.
        """
        r = self.rank
        key = f"loss{r.model.mtp_layers - k.count('loss')}"
        k.module = key
        scores = Tensor((r.tokens, self._columns), r.precision.compute)
        inner = k.vector(
            "cross_entropy.backward",
            "cross_entropy",
            [scores],
            [scores],
            after=[f"{key}.logits", f"{key}.loss"],
        )
        back = r.column_backward(k, self._head(), inner, f"{key}.head_input")
        return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)

    # --- further predictions (arXiv 2412.19437, section 2.2)

    def _joined(self) -> Linear:
        r = self.rank
        return Linear(name="mtp_proj", inputs=2 * r.hidden, outputs=r.hidden, rows=r.rows)

    def next_token(self, k: Kernels, number: int, x: Value) -> Value:
        """Two hidden vectors, normalised, to one."""
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
        return r.linear(k, self._joined(), joined)

    def next_token_backward(self, k: Kernels, number: int, grad: Value) -> Value:
        """The gradient of the hidden vector that was joined; that of the embedding is made beside it."""
        r = self.rank
        module = k.module = f"layers.{number}.mtp"
        back = r.linear_backward(k, self._joined(), grad, f"mtp.{number}.joined")
        if r.trains_weights:
            two = r.norm_backward(k, "embedding_norm.backward", back, f"mtp.{number}.embedded", -1)
            self.embed_backward(k, two, f"mtp.{number}.embedding.grad")
            k.module = module
        return r.norm_backward(k, "hidden_norm.backward", back, f"mtp.{number}.input", -1)

    # --- the end of a step

    def shared_gradients(
        self, k: Kernels, stage: int, done: Sequence[Value], weights: Weights
    ) -> list[Value]:
        """Sums of gradients of what several ranks hold whole: those of replicated weights over tensor ranks,
        those of an embedding over the first and the last stage, where both have it.
        """
        r = self.rank
        nodes: list[Value] = []
        if weights.replicated:
            parts = Tensor((weights.replicated,), r.gradient)
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
            pairs = ExplicitGroups(tuple((each, each + (pp - 1) * inner) for each in range(inner)))
            parts = Tensor((copied,), r.gradient)
            nodes.append(
                k.collective("embedding.all_reduce", CollectiveKind.ALL_REDUCE, pairs, parts, after=done)
            )
        return nodes

    def finish(
        self,
        k: Kernels,
        weights: Weights,
        reduced: Sequence[Value],
        regather: Callable[[Kernels, Value], None],
    ) -> None:
        """The norm of all gradients, the update, on the host where its states are, and updated weights where
        they are needed.
        """
        r = self.rank
        layout = r.layout
        shards = layout.sharded if layout.zero else 1
        expert_shards = layout.expert_sharded if layout.zero else 1
        elements = -(-weights.dense // shards) + -(-weights.experts // expert_shards)
        k.module = "optimizer"
        if not elements:
            self._norm_of_all(k, reduced)
            return
        pure = r.training.pure_16bit
        flat = (-(-elements // _ROW), min(elements, _ROW))  # kernels go over all tensors at once
        gradient = Tensor(flat, r.gradient)
        after: list[Value] = list(reduced)
        if r.training.grad_norm:
            one = Tensor((1,), "f32")
            norm: list[Value] = [k.vector("grad_norm", "norm", [gradient], [one], after=after)]
            after = self._norm_of_all(k, norm)
        state = Tensor(flat, r.precision.compute if pure else "f32")
        copy = Tensor(flat, r.precision.compute)
        reads = [gradient, state, state] + ([] if pure else [state])
        writes = [state, state] + ([copy] if pure else [state, copy])
        arguments = reads + ([copy] if pure else []), writes
        if not r.training.optimizer_offload:
            regather(k, k.vector("adam", "adam", *arguments, after=after, in_place=True))
            return
        after.append(k.transfer("gradients.offload", gradient, stores=True, after=reduced))
        # of a class that is no kernel's of a device: how long a host takes is not known
        node = k.node("adam", "cpu_adam", OpClass.CUSTOM, *arguments, after=after, in_place=True)
        k.builder.set(node, resource=int(Resource.HOST))
        new = copy if r.training.style == "megatron" else state
        regather(k, k.transfer("weights.reload", new, stores=False, after=[node], in_place=True))

    def _norm_of_all(self, k: Kernels, after: Sequence[Value]) -> list[Value]:
        """The sum of the parts of a norm, which a stage without trained weights waits for too."""
        r = self.rank
        if not r.training.grad_norm or r.layout.ranks == 1:
            return list(after)
        one, everyone = Tensor((1,), "f32"), r.groups.everyone
        return [k.collective("grad_norm.all_reduce", CollectiveKind.ALL_REDUCE, everyone, one, after=after)]
