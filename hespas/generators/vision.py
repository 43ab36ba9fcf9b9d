"""A training step of a vision transformer (arXiv 2010.11929) or a diffusion transformer with adaLN-Zero (DiT,
arXiv 2212.09748): data parallel, weights replicated or sharded (FSDP).

A unit (the embeddings, each block, the head) is what FSDP gathers before use, forward and backward, and whose
gradients are reduced as soon as they are there. A product of forward costs 2 FLOPs a weight and row; backward
it is two such products, the first layer needs no gradient of its input. Biases are added by the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hespas.generators.llm.assemble import Part
from hespas.generators.llm.kernels import AttentionShape, Kernels, Tensor
from hespas.generators.spec import Account, Bounded
from hespas.graph import CollectiveKind, GraphBuilder, StepFacts, StridedGroups, Workload
from hespas.graph.errors import UsageError

__all__ = ["VisionModel", "VisionStep", "dit_xl_2", "vit_b_16"]

_MOST_RANKS, _MOST_LAYERS, _MOST_ELEMENTS = 1 << 24, 10_000, 1 << 50
_FREQUENCIES = 256
"""Sines and cosines that stand for a timestep, before its two layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModel(Bounded):
    """``image`` and ``patch`` are sides in pixels (of the latent for DiT). ``classes`` are those of the head,
    or labels that condition a ``diffusion`` model, which predicts noise and its variance; one more label
    stands for none.
    """

    name: str
    image: int
    patch: int
    channels: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    classes: int
    diffusion: bool = False

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def tokens(self) -> int:
        """Patches and, for classification, the class token."""
        return self.patches + (0 if self.diffusion else 1)

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return self.patch**2 * self.channels

    @property
    def embedding_parameters(self) -> int:
        """Patches, positions (fixed for DiT, and counted), class token or timestep and label embeddings."""
        h = self.hidden
        found = (self.pixels + 1) * h + self.tokens * h
        if self.diffusion:
            return found + (_FREQUENCIES + 1) * h + (h + 1) * h + (self.classes + 1) * h
        return found + h

    @property
    def block_parameters(self) -> int:
        """Attention, MLP and two norms, or the modulation in their place."""
        h, f = self.hidden, self.ffn
        products = 3 * h * (h + 1) + h * (h + 1) + f * (h + 1) + h * (f + 1)
        return products + (6 * h * (h + 1) if self.diffusion else 4 * h)

    @property
    def head_parameters(self) -> int:
        """The last norm or modulation, and the last layer."""
        h = self.hidden
        if self.diffusion:
            return 2 * h * (h + 1) + 2 * self.pixels * (h + 1)
        return 2 * h + self.classes * (h + 1)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embedding_parameters + self.layers * self.block_parameters + self.head_parameters

    def check(self) -> None:
        """Raise ``UsageError`` for sizes that do not divide."""
        if min(self.image, self.patch, self.channels, self.hidden, self.layers, self.heads, self.ffn) < 1:
            raise UsageError(f"{self.name}: all sizes are at least 1")
        if self.image % self.patch:
            raise UsageError(f"{self.name}: patches of {self.patch} do not tile an image of {self.image}")
        if self.hidden % self.heads:
            raise UsageError(f"{self.name}: {self.heads} heads do not divide a width of {self.hidden}")


def vit_b_16() -> VisionModel:
    """ViT-B/16 on ImageNet, 86.6 M parameters."""
    return VisionModel(
        name="vit-b-16", image=224, patch=16, channels=3, hidden=768, layers=12, heads=12, ffn=3072,
        classes=1000,
    )  # fmt: skip


def dit_xl_2() -> VisionModel:
    """DiT-XL/2 on latents of 256 x 256 images, 675 M parameters."""
    return VisionModel(
        name="dit-xl-2", image=32, patch=2, channels=4, hidden=1152, layers=28, heads=16, ffn=4608,
        classes=1000, diffusion=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionStep(Bounded):
    """``batch`` images on each of ``dp`` ranks; ``fsdp``: weights, gradients and states are sharded."""

    model: VisionModel
    dp: int = 1
    batch: int = 1
    fsdp: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Model and layout."""
        return f"{self.model.name}-{'fsdp' if self.fsdp else 'dp'}{self.dp}"

    @property
    def element(self) -> str:
        """Element type of the tensors: products in TF32 are of f32."""
        return "f32" if self.dtype == "tf32" else self.dtype

    def workload(self) -> Workload:
        """One class of ranks."""
        self.model.check()
        if self.dp < 1 or self.batch < 1:
            raise UsageError("a step has at least one rank, and one image on each", hint="`dp`, `batch`")
        model = self.model
        scores = self.batch * model.heads * model.tokens**2
        if self.dp > _MOST_RANKS or model.layers > _MOST_LAYERS or scores > _MOST_ELEMENTS:
            raise UsageError(
                f"more than {_MOST_RANKS:,} ranks, {_MOST_LAYERS:,} layers, or 2**50 scores of attention",
                hint="smaller `dp`, `batch`, layers or image",
            )
        if self.dtype not in {"bf16", "f16", "f32", "tf32"}:
            raise UsageError(f"no element type to train in: {self.dtype!r}", hint="bf16, f16, f32 or tf32")
        builder = GraphBuilder(self.name)
        _Step(self, Kernels(builder, Part("step", 0, 0), tf32=self.dtype == "tf32")).run()
        flops = self.account().model_flops_per_step
        facts = StepFacts(kind="vision", model_flops=flops, ranks=self.dp, dtype=self.dtype)
        return Workload.spmd(builder.build(), self.dp, facts.metadata())

    def account(self) -> Account:
        """FLOPs of products, attention on all pairs, nothing computed again; memory is not accounted for."""
        flops = float(self.dp * self.batch * self._flops_of_an_image())
        return Account(
            parameters=float(self.model.parameters), model_flops_per_step=flops, hardware_flops_per_step=flops
        )

    def _flops_of_an_image(self) -> int:
        m, h = self.model, self.model.hidden
        block = m.tokens * (4 * h * h + 2 * h * m.ffn) + (6 * h * h if m.diffusion else 0)
        weights = m.layers * block
        weights += m.tokens * 2 * m.pixels * h + 2 * h * h if m.diffusion else h * m.classes
        weights += h * h if m.diffusion else 0
        inputs = m.patches * m.pixels * h + (_FREQUENCIES * h if m.diffusion else 0)
        return 6 * weights + 4 * inputs + 12 * m.layers * m.tokens**2 * h


_Backward = Callable[[], None]


@dataclass(slots=True)
class _Step:
    """Forward records what backward does. ``now`` is the value or the gradient at hand, ``said`` the
    conditioning, ``talked`` the last collective, ``made`` gradients of weights of this unit.
    """

    step: VisionStep
    kernels: Kernels
    now: int = -1
    said: int = -1
    talked: int = -1
    gathered: int = -1
    made: list[int] = field(default_factory=list[int])
    said_gradients: list[int] = field(default_factory=list[int])
    reduced: list[int] = field(default_factory=list[int])
    tape: list[_Backward] = field(default_factory=list[_Backward])

    def run(self) -> None:
        model = self.step.model
        self._unit("embed", model.embedding_parameters, self._embed)
        for layer in range(model.layers):
            self._unit(f"blocks.{layer}", model.block_parameters, self._block)
        self._unit("head", model.head_parameters, self._head)
        self._loss()
        for backward in reversed(self.tape):
            backward()
        self._optimizer()

    def _unit(self, name: str, parameters: int, forward: Callable[[], None]) -> None:
        """A unit's pass, between its collectives."""
        self.kernels.module = name
        self._gather("gather", parameters)
        self.tape.append(lambda: self._reduce(name, parameters))
        forward()
        self.tape.append(lambda: self._enter(name, parameters))

    def _enter(self, name: str, parameters: int) -> None:
        self.kernels.module = name
        self.made = []
        self._gather("gather_again", parameters)

    def _collective(self, name: str, kind: CollectiveKind, size: int, dtype: str, after: list[int]) -> int:
        groups = StridedGroups.all_ranks(self.step.dp)
        padded = -(-size // self.step.dp) * self.step.dp
        self.talked = self.kernels.collective(
            name, kind, groups, Tensor((padded,), dtype), after=after, control=[self.talked]
        )
        return self.talked

    def _gather(self, name: str, parameters: int) -> None:
        if self.step.fsdp and self.step.dp > 1:
            kind = CollectiveKind.ALL_GATHER
            self.gathered = self._collective(name, kind, parameters, self.step.element, [])

    def _reduce(self, name: str, parameters: int) -> None:
        self.kernels.module = name
        if self.step.dp == 1:
            self.reduced += self.made
            return
        kind = CollectiveKind.REDUCE_SCATTER if self.step.fsdp else CollectiveKind.ALL_REDUCE
        self.reduced.append(self._collective("reduce", kind, parameters, "f32", self.made))

    def _linear(self, name: str, inputs: int, outputs: int, rows: int, *, first: bool = False) -> None:
        kernels, dtype, source = self.kernels, self.step.element, self.now
        after = [source, self.gathered]
        self.now = kernels.product(name, (rows, outputs, inputs), left=dtype, result=dtype, after=after)

        def backward() -> None:
            given, after = self.now, [self.now, self.gathered]
            sizes = (inputs, outputs, rows)
            grads = [given, source]
            made = kernels.product(f"{name}.dw", sizes, left=dtype, result="f32", after=grads)
            self.made.append(made)
            if not first:
                sizes = (rows, inputs, outputs)
                self.now = kernels.product(f"{name}.dx", sizes, left=dtype, result=dtype, after=after)

        self.tape.append(backward)

    def _vector(self, name: str, what: str, shape: tuple[int, ...], after: list[int], back: str = "") -> None:
        kernels, value = self.kernels, Tensor(shape, self.step.element)
        self.now = kernels.vector(name, what, [value] * len(after), [value], after=after)

        def backward() -> None:
            reads, given = [value, value], self.now
            self.now = kernels.vector(f"{name}.dx", back or what, reads, [value], after=[given, *after])

        self.tape.append(backward)

    def _attention(self) -> None:
        model, kernels = self.step.model, self.kernels
        head, n = model.hidden // model.heads, model.tokens
        shape = AttentionShape(self.step.batch, model.heads, model.heads, n, n, head, head, float(n * n))
        source = self.now
        self.now = kernels.attention("attention", shape, self.step.element, after=[source])
        out = self.now

        def backward() -> None:
            after = [self.now, source, out]
            self.now = kernels.attention("attention.dx", shape, self.step.element, backward=True, after=after)

        self.tape.append(backward)

    def _embed(self) -> None:
        model, batch = self.step.model, self.step.batch
        h = model.hidden
        if model.diffusion:
            self._linear("timestep.0", _FREQUENCIES, h, batch, first=True)
            self._vector("timestep.silu", "silu", (batch, h), [self.now])
            self._linear("timestep.2", h, h, batch)
            value = Tensor((batch, h), self.step.element)
            label = self.kernels.vector("label", "embedding", [value], [value], after=[self.gathered])
            self._vector("condition", "add", (batch, h), [self.now, label])
            self._vector("condition.silu", "silu", (batch, h), [self.now])
            self.said = self.now
            self.now = -1
            self.tape.append(self._condition)
        self._linear("patches", model.pixels, h, batch * model.patches, first=True)
        self._vector("positions", "add", (batch * model.tokens, h), [self.now])

    def _modulation(self, name: str, parts: int) -> list[int]:
        """Scales, shifts and gates of each image: a layer of what conditions the model."""
        if not self.step.model.diffusion:
            return []
        stream, self.now = self.now, self.said
        self._linear(name, self.step.model.hidden, parts * self.step.model.hidden, self.step.batch)
        made, self.now = self.now, stream
        inner = self.tape.pop()

        def backward() -> None:
            stream = self.now
            inner()
            self.said_gradients.append(self.now)
            self.now = stream

        self.tape.append(backward)
        return [made]

    def _condition(self) -> None:
        """Backward: the gradients of what conditions the model, of all blocks, added up."""
        value = Tensor((self.step.batch, self.step.model.hidden), self.step.element)
        given = self.said_gradients
        self.now = self.kernels.vector("condition.sum", "add", [value] * len(given), [value], after=given)

    def _block(self) -> None:
        model = self.step.model
        h, rows = model.hidden, self.step.batch * model.tokens
        said = self._modulation("modulation", 6)
        for part in ("attention", "mlp"):
            stream = self.now
            self._vector(f"{part}.norm", "layer_norm", (rows, h), [stream, *said], "layer_norm_backward")
            if part == "attention":
                self._linear("qkv", h, 3 * h, rows)
                self._attention()
                self._linear("proj", h, h, rows)
            else:
                self._linear("fc1", h, model.ffn, rows)
                self._vector("gelu", "gelu", (rows, model.ffn), [self.now])
                self._linear("fc2", model.ffn, h, rows)
            self._vector(f"{part}.residual", "add", (rows, h), [self.now, stream, *said])

    def _head(self) -> None:
        model, batch = self.step.model, self.step.batch
        h, rows = model.hidden, batch * model.tokens
        said = self._modulation("modulation", 2)
        self._vector("norm", "layer_norm", (rows, h), [self.now, *said], "layer_norm_backward")
        if model.diffusion:
            self._linear("noise", h, 2 * model.pixels, rows)
        else:
            self._linear("classes", h, model.classes, batch)

    def _loss(self) -> None:
        model, batch = self.step.model, self.step.batch
        shape = (batch * model.patches, 2 * model.pixels) if model.diffusion else (batch, model.classes)
        what = "add" if model.diffusion else "cross_entropy"
        out = Tensor(shape, self.step.element)
        self.kernels.module = "loss"
        self.now = self.kernels.vector("loss", what, [out], [out], after=[self.now])

    def _optimizer(self) -> None:
        shards = self.step.dp if self.step.fsdp else 1
        shape = (-(-self.step.model.parameters // shards),)
        state = [Tensor(shape, "f32")] * 3
        self.kernels.module = "optimizer"
        reads, writes = [*state, Tensor(shape, "f32")], [*state, Tensor(shape, self.step.element)]
        self.kernels.vector("adam", "adam", reads, writes, after=self.reduced)
