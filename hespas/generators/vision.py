"""Training step of a vision transformer (arXiv 2010.11929) or a diffusion transformer with adaLN-Zero (DiT,
arXiv 2212.09748): data parallel, with replicated or sharded weights (FSDP).

The model is divided into units: the embeddings, each block, and the head. FSDP gathers the weights of a unit
before each of its passes, and reduces its gradients as soon as they are complete. A forward product costs 2
FLOPs per weight and row. The backward pass has two such products, except in the first layer, whose input
needs no gradient. Biases are added by the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hespas.generators.llm.kernels import AttentionShape, KernelWriter, TensorSpec
from hespas.generators.llm.schedule import PassTemplate
from hespas.generators.spec import Account, Bounded, check_positive
from hespas.graph import CollectiveKind, GraphBuilder, StepFacts, StridedGroups, Workload
from hespas.graph.errors import UsageError

__all__ = ["VisionModel", "VisionStep", "dit_xl_2", "vit_b_16"]

_MOST_RANKS, _MOST_LAYERS, _MOST_ELEMENTS = 1 << 24, 10_000, 1 << 50
_FREQUENCIES = 256
"""Number of sines and cosines that encode a timestep before its two layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModel(Bounded):
    """Sizes of a vision model. ``image`` and ``patch`` are side lengths in pixels (for DiT, of the latent).

    ``classes`` is the number of classes of the head. For a ``diffusion`` model, which predicts noise and its
    variance, it is the number of labels; the model has one more label for "none".
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
        """Number of patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def tokens(self) -> int:
        """Number of patches, plus the class token for classification."""
        return self.patches + (0 if self.diffusion else 1)

    @property
    def pixels(self) -> int:
        """Number of input values of a patch."""
        return self.patch**2 * self.channels

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings: patches, positions (fixed in DiT, but counted), and the class token,
        or timestep and labels in DiT.
        """
        h = self.hidden
        patches = (self.pixels + 1) * h + self.tokens * h
        if self.diffusion:
            return patches + (_FREQUENCIES + 1) * h + (h + 1) * h + (self.classes + 1) * h
        return patches + h

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: attention, MLP, and two norms; in DiT a modulation layer replaces the
        norms.
        """
        h, f = self.hidden, self.ffn
        products = 3 * h * (h + 1) + h * (h + 1) + f * (h + 1) + h * (f + 1)
        return products + (6 * h * (h + 1) if self.diffusion else 4 * h)

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm or modulation, and of the last layer."""
        h = self.hidden
        if self.diffusion:
            return 2 * h * (h + 1) + 2 * self.pixels * (h + 1)
        return 2 * h + self.classes * (h + 1)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding_parameters + self.layers * self.block_parameters + self.head_parameters

    def check(self) -> None:
        """Raise ``UsageError`` for sizes that do not divide evenly."""
        sizes = ("image", "patch", "channels", "hidden", "layers", "heads", "ffn")
        check_positive({name: getattr(self, name) for name in sizes}, owner=f"{self.name}: ")
        if self.image % self.patch:
            raise UsageError(
                f"{self.name}: image {self.image} is not a multiple of the patch, {self.patch}",
                hint=f"set `image={-(-self.image // self.patch) * self.patch}`",
            )
        if self.hidden % self.heads:
            raise UsageError(
                f"{self.name}: hidden {self.hidden} is not a multiple of the {self.heads} heads",
                hint="choose a width that the heads divide",
            )


def vit_b_16() -> VisionModel:
    """Return ViT-B/16 on ImageNet, 86.6 M parameters."""
    return VisionModel(
        name="vit-b-16", image=224, patch=16, channels=3, hidden=768, layers=12, heads=12, ffn=3072,
        classes=1000,
    )  # fmt: skip


def dit_xl_2() -> VisionModel:
    """Return DiT-XL/2 on latents of 256 x 256 images, 675 M parameters."""
    return VisionModel(
        name="dit-xl-2", image=32, patch=2, channels=4, hidden=1152, layers=28, heads=16, ffn=4608,
        classes=1000, diffusion=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionStep(Bounded):
    """Step with ``batch`` images on each of ``dp`` ranks; ``fsdp``: weights, gradients and states are
    sharded.
    """

    model: VisionModel
    dp: int = 1
    batch: int = 1
    fsdp: bool = False
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Name with the model and the layout."""
        return f"{self.model.name}-{'fsdp' if self.fsdp else 'dp'}{self.dp}"

    @property
    def element(self) -> str:
        """Element type of the tensors; products in TF32 have f32 tensors."""
        return "f32" if self.dtype == "tf32" else self.dtype

    def workload(self) -> Workload:
        """Make a workload of one rank class."""
        self.model.check()
        check_positive({"dp": self.dp, "batch": self.batch})
        model = self.model
        scores = self.batch * model.heads * model.tokens**2
        bounds = {"ranks": (self.dp, _MOST_RANKS, "dp"), "layers": (model.layers, _MOST_LAYERS, "layers")}
        for name, (count, most, option) in bounds.items():
            if count > most:
                raise UsageError(
                    f"{count:,} {name} exceed the limit of {most:,}", hint=f"choose a smaller `{option}`"
                )
        if scores > _MOST_ELEMENTS:
            raise UsageError(
                f"{float(scores):.3g} attention scores (batch x heads x tokens^2) exceed the limit of 2**50",
                hint="choose a smaller `batch` or `image`",
            )
        if self.dtype not in {"bf16", "f16", "f32", "tf32"}:
            raise UsageError(
                f"{self.dtype!r} is not an element type for training", hint="choose bf16, f16, f32 or tf32"
            )
        builder = GraphBuilder(self.name)
        _VisionWriter(
            self, KernelWriter(builder, PassTemplate("step", 0, 0), tf32=self.dtype == "tf32")
        ).run()
        flops = self.account().model_flops_per_step
        facts = StepFacts(kind="vision", model_flops=flops, ranks=self.dp, dtype=self.dtype)
        return Workload.spmd(builder.build(), self.dp, facts.metadata())

    def account(self) -> Account:
        """Return the FLOPs of the matmuls, without recomputation. Attention is counted for all pairs of
        tokens. Memory is not included.
        """
        m, h = self.model, self.model.hidden
        block = m.tokens * (4 * h * h + 2 * h * m.ffn) + (6 * h * h if m.diffusion else 0)
        weights = m.layers * block
        weights += m.tokens * 2 * m.pixels * h + 2 * h * h if m.diffusion else h * m.classes
        weights += h * h if m.diffusion else 0
        inputs = m.patches * m.pixels * h + (_FREQUENCIES * h if m.diffusion else 0)
        image_flops = 6 * weights + 4 * inputs + 12 * m.layers * m.tokens**2 * h
        flops = float(self.dp * self.batch * image_flops)
        return Account(
            parameters=float(self.model.parameters), model_flops_per_step=flops, hardware_flops_per_step=flops
        )


_Backward = Callable[[], None]


@dataclass(slots=True)
class _VisionWriter:
    """Writer of the nodes of a step. The forward pass records the functions that write the backward pass on a
    tape.

    ``current`` is the node of the current value or gradient, ``condition`` the node of the conditioning
    value. ``weight_gradients`` are the weight gradients of the current group of layers.
    """

    step: VisionStep
    kernels: KernelWriter
    current: int = -1
    condition: int = -1
    last_collective: int = -1
    gathered: int = -1
    weight_gradients: list[int] = field(default_factory=list[int])
    condition_gradients: list[int] = field(default_factory=list[int])
    reduced: list[int] = field(default_factory=list[int])
    tape: list[_Backward] = field(default_factory=list[_Backward])

    def run(self) -> None:
        model = self.step.model
        self._unit("embed", model.embedding_parameters, self._embed)
        for layer in range(model.layers):
            self._unit(f"blocks.{layer}", model.block_parameters, self._block)
        self._unit("head", model.head_parameters, self._head)
        batch = self.step.batch
        shape = (batch * model.patches, 2 * model.pixels) if model.diffusion else (batch, model.classes)
        out = TensorSpec(shape, self.step.element)
        self.kernels.module = "loss"
        loss = "add" if model.diffusion else "cross_entropy"
        self.current = self.kernels.vector("loss", loss, [out], [out], after=[self.current])
        for backward in reversed(self.tape):
            backward()
        shards = self.step.dp if self.step.fsdp else 1
        flat = (-(-model.parameters // shards),)
        state = [TensorSpec(flat, "f32")] * 3
        self.kernels.module = "optimizer"
        reads, writes = [*state, TensorSpec(flat, "f32")], [*state, TensorSpec(flat, self.step.element)]
        self.kernels.vector("adam", "adam", reads, writes, after=self.reduced)

    def _unit(self, name: str, parameters: int, forward: Callable[[], None]) -> None:
        """Add a group of layers: the gather of its weights, then its forward pass, which ``forward`` writes.
        The collectives of its backward pass are recorded on the tape.
        """
        self.kernels.module = name
        self._gather("gather", parameters)

        def reduce() -> None:
            self.kernels.module = name
            if self.step.dp == 1:
                self.reduced += self.weight_gradients
                return
            kind = CollectiveKind.REDUCE_SCATTER if self.step.fsdp else CollectiveKind.ALL_REDUCE
            self.reduced.append(self._collective("reduce", kind, parameters, "f32", self.weight_gradients))

        self.tape.append(reduce)
        forward()

        def enter() -> None:
            self.kernels.module = name
            self.weight_gradients = []
            self._gather("gather_again", parameters)

        self.tape.append(enter)

    def _collective(self, name: str, kind: CollectiveKind, size: int, dtype: str, after: list[int]) -> int:
        groups = StridedGroups.all_ranks(self.step.dp)
        padded = -(-size // self.step.dp) * self.step.dp
        self.last_collective = self.kernels.collective(
            name, kind, groups, TensorSpec((padded,), dtype), after=after, control=[self.last_collective]
        )
        return self.last_collective

    def _gather(self, name: str, parameters: int) -> None:
        if self.step.fsdp and self.step.dp > 1:
            kind = CollectiveKind.ALL_GATHER
            self.gathered = self._collective(name, kind, parameters, self.step.element, [])

    def _linear(self, name: str, inputs: int, outputs: int, rows: int, *, first: bool = False) -> None:
        kernels, dtype, source = self.kernels, self.step.element, self.current
        after = [source, self.gathered]
        self.current = kernels.product(name, (rows, outputs, inputs), left=dtype, result=dtype, after=after)

        def backward() -> None:
            grad, after = self.current, [self.current, self.gathered]
            sizes = (inputs, outputs, rows)
            weights = kernels.product(f"{name}.dw", sizes, left=dtype, result="f32", after=[grad, source])
            self.weight_gradients.append(weights)
            if not first:
                sizes = (rows, inputs, outputs)
                self.current = kernels.product(f"{name}.dx", sizes, left=dtype, result=dtype, after=after)

        self.tape.append(backward)

    def _vector(
        self, name: str, kernel: str, shape: tuple[int, ...], after: list[int], backward_kernel: str = ""
    ) -> None:
        kernels, value = self.kernels, TensorSpec(shape, self.step.element)
        self.current = kernels.vector(name, kernel, [value] * len(after), [value], after=after)

        def backward() -> None:
            reads, before = [value, value], [self.current, *after]
            self.current = kernels.vector(
                f"{name}.dx", backward_kernel or kernel, reads, [value], after=before
            )

        self.tape.append(backward)

    def _attention(self) -> None:
        model, kernels = self.step.model, self.kernels
        head, n = model.hidden // model.heads, model.tokens
        shape = AttentionShape(self.step.batch, model.heads, model.heads, n, n, head, head, float(n * n))
        source = self.current
        self.current = kernels.attention("attention", shape, self.step.element, after=[source])
        out = self.current

        def backward() -> None:
            after = [self.current, source, out]
            self.current = kernels.attention(
                "attention.dx", shape, self.step.element, backward=True, after=after
            )

        self.tape.append(backward)

    def _embed(self) -> None:
        model, batch = self.step.model, self.step.batch
        h = model.hidden
        if model.diffusion:
            self._linear("timestep.0", _FREQUENCIES, h, batch, first=True)
            self._vector("timestep.silu", "silu", (batch, h), [self.current])
            self._linear("timestep.2", h, h, batch)
            value = TensorSpec((batch, h), self.step.element)
            label = self.kernels.vector("label", "embedding", [value], [value], after=[self.gathered])
            self._vector("condition", "add", (batch, h), [self.current, label])
            self._vector("condition.silu", "silu", (batch, h), [self.current])
            self.condition = self.current
            self.current = -1

            def sum_condition_gradients() -> None:
                grads = self.condition_gradients
                reads = [value] * len(grads)
                self.current = self.kernels.vector("condition.sum", "add", reads, [value], after=grads)

            self.tape.append(sum_condition_gradients)
        self._linear("patches", model.pixels, h, batch * model.patches, first=True)
        self._vector("positions", "add", (batch * model.tokens, h), [self.current])

    def _modulation(self, name: str, parts: int) -> list[int]:
        """Add a linear layer that computes scales, shifts and gates of each image from the conditioning
        value.
        """
        if not self.step.model.diffusion:
            return []
        stream, self.current = self.current, self.condition
        self._linear(name, self.step.model.hidden, parts * self.step.model.hidden, self.step.batch)
        modulation, self.current = self.current, stream
        inner = self.tape.pop()

        def backward() -> None:
            stream = self.current
            inner()
            self.condition_gradients.append(self.current)
            self.current = stream

        self.tape.append(backward)
        return [modulation]

    def _block(self) -> None:
        model = self.step.model
        h, rows = model.hidden, self.step.batch * model.tokens
        modulation = self._modulation("modulation", 6)
        for part in ("attention", "mlp"):
            stream = self.current
            self._vector(
                f"{part}.norm", "layer_norm", (rows, h), [stream, *modulation], "layer_norm_backward"
            )
            if part == "attention":
                self._linear("qkv", h, 3 * h, rows)
                self._attention()
                self._linear("proj", h, h, rows)
            else:
                self._linear("fc1", h, model.ffn, rows)
                self._vector("gelu", "gelu", (rows, model.ffn), [self.current])
                self._linear("fc2", model.ffn, h, rows)
            self._vector(f"{part}.residual", "add", (rows, h), [self.current, stream, *modulation])

    def _head(self) -> None:
        model, batch = self.step.model, self.step.batch
        h, rows = model.hidden, batch * model.tokens
        modulation = self._modulation("modulation", 2)
        self._vector("norm", "layer_norm", (rows, h), [self.current, *modulation], "layer_norm_backward")
        if model.diffusion:
            self._linear("noise", h, 2 * model.pixels, rows)
        else:
            self._linear("classes", h, model.classes, batch)
