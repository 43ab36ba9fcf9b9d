"""What a rank holds between passes: weights, their gradients, what the optimizer remembers, gathered weights.

Mixed precision with Adam: 16-bit weights, gradients that add up in 32 bits, 32-bit weights and two 32-bit
moments (arXiv 1710.03740, 1412.6980). ZeRO parts the last three over data ranks, then gradients, then weights
(arXiv 1910.02054); weights that are parted are gathered layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hespas.generators.llm.kept import Parts, matrix_shapes, storage, total
from hespas.generators.llm.model import Experts, Layer
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.weights import Weights, weights_of_layer, weights_of_rest
from hespas.graph.columns import dtype

__all__ = ["State"]

_WORKSPACE_BYTES = 32 * 2**20
"""What a matrix library asks for on a stream, on current devices."""


@dataclass(frozen=True)
class State:
    """The weights of the ``layers`` of a rank, and what belongs to them. Four-bit weights that are trained
    are made from 16-bit ones (arXiv 2509.25149); frozen ones, and those of a rank that ``serves``, are not.
    """

    rank: Rank
    layers: tuple[Layer, ...]
    first: bool
    last: bool
    serves: bool = False

    @cached_property
    def rest(self) -> Weights:
        """Parameters outside of layers."""
        rank = self.rank
        return weights_of_rest(rank.model, rank.layout, rank.training, first=self.first, last=self.last)

    def of_layer(self, layer: Layer) -> Weights:
        """Parameters of a layer."""
        return weights_of_layer(self.rank.model, self.rank.layout, self.rank.training, layer)

    @cached_property
    def weights(self) -> Weights:
        """All parameters of the rank."""
        found = self.rest
        for layer in self.layers:
            found += self.of_layer(layer)
        return found

    @property
    def shards_weights(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.rank.layout.zero == 3

    @property
    def in_torch(self) -> bool:
        """Whether the optimizer updates the weights themselves, which are converted where they are used."""
        return self.rank.training.style != "megatron"

    @property
    def in_xla(self) -> bool:
        """Whether layers are a loop that XLA compiles: weights are gathered in its body, others at use."""
        return self.rank.training.style == "maxtext"

    def _shared(self, weights: Weights, level: int, of_each: int) -> int:
        """Bytes of trained parameters, parted from that level of ZeRO on."""
        layout = self.rank.layout
        if layout.zero < level:
            return of_each * (weights.dense + weights.experts)
        return self._parted(of_each * weights.dense, of_each * weights.experts)

    def _parted(self, dense: int, experts: int) -> int:
        """Bytes of a rank's shard of dense weights and of experts."""
        layout = self.rank.layout
        return -(-dense // layout.sharded) + -(-experts // layout.expert_sharded)

    @cached_property
    def parts(self) -> Parts:
        """Bytes by what they are, without gradients."""
        training, weights = self.rank.training, self.weights
        wide = 2 if training.pure_16bit else 4
        moments = self._shared(weights, 1, 2 * wide)
        master = self._shared(weights, 3 if self.in_torch else 1, wide)
        if training.optimizer_offload:
            moments = 0
            master = master if self.in_torch else 0
        if self.in_torch:
            compute = self.rank.precision.compute
            fixed, experts = (storage(each, compute) for each in (weights.frozen, weights.frozen_experts))
            frozen = self._parted(fixed, experts) if self.shards_weights else fixed + experts
            return {"weights": master + frozen, "optimizer moments": moments}
        keeps_master = not training.pure_16bit and self.rank.precision.compute != "f32"
        return {
            "weights": self.working,
            "master weights": master if keeps_master else 0,
            "optimizer moments": moments,
        }

    @cached_property
    def gradients(self) -> int:
        """Accumulated gradients."""
        training = self.rank.training
        each = 2 if training.pure_16bit else storage(1, self.rank.precision.gradient)
        return self._shared(self.weights, 2, each)

    @cached_property
    def working(self) -> int:
        """Weights as layers use them."""
        weights = self.weights
        dense, experts = weights.dense + weights.frozen, weights.experts + weights.frozen_experts
        narrow, of_experts = self._narrow_elements() if self.rank.precision.quantizes else (0, 0)
        if not self.shards_weights:
            return self._in_use(dense + experts, narrow + of_experts)
        return self._parted(self._in_use(dense, narrow), self._in_use(experts, of_experts))

    def _in_use(self, every: int, narrow: int) -> int:
        """Bytes of weights of which so many are ``narrow``."""
        rank, training = self.rank, self.rank.training
        element = rank.precision.matmul
        layouts = 2 if training.transposed_weights or element == "mxfp8" else 1
        copies = layouts * storage(narrow, element)
        frozen = self.serves or training.lora_rank
        if training.narrow_weights and (dtype(element).bits == 8 or frozen):
            every -= narrow
        return storage(every, rank.precision.compute) + copies

    def _narrow_elements(self) -> tuple[int, int]:
        """Elements of the matrices of linear layers: dense ones, and of experts."""
        dense = experts = 0
        for layer in self.layers:
            for block in layer:
                shapes = matrix_shapes(self.rank, block)
                dense += sum(rows * columns for rows, columns in shapes)
                if isinstance(block, Experts):
                    each = sum(rows * columns for rows, columns in shapes[-2:])
                    dense -= each
                    experts += block.experts // self.rank.layout.ep * each
        return dense, experts

    @cached_property
    def placeholders(self) -> int:
        """Gradients that go straight into accumulated ones leave a tensor of their shape in their place, one
        for all matrices of that shape (Transformer Engine).
        """
        rank = self.rank
        if self.in_torch or not rank.trains_weights or self.shards_weights:
            return 0
        shapes = {shape for layer in self.layers for block in layer for shape in matrix_shapes(rank, block)}
        if self.last:
            shapes.add((-(-rank.model.vocab // rank.layout.tp), rank.hidden))
            if rank.model.mtp_layers:
                shapes.add((rank.hidden, 2 * rank.hidden))
        return storage(sum(rows * columns for rows, columns in shapes), rank.precision.compute)

    @cached_property
    def workspaces(self) -> int:
        """Of matrix libraries: of layers, of other products both ways, of four streams of experts."""
        if self.in_torch:
            return _WORKSPACE_BYTES
        has_experts = any(isinstance(block, Experts) for layer in self.layers for block in layer)
        return _WORKSPACE_BYTES * (7 if has_experts else 3)

    def gathered(self, layer: Layer | None) -> int:
        """The weights of a layer as it uses them, or of what stands outside of layers."""
        weights = self.rest if layer is None else self.of_layer(layer)
        every = weights.dense + weights.experts + weights.frozen + weights.frozen_experts
        return storage(every, self.rank.precision.compute)

    def trained(self, layer: Layer | None) -> int:
        """Trained parameters of a layer, or of what stands outside of layers."""
        weights = self.rest if layer is None else self.of_layer(layer)
        return weights.dense + weights.experts

    @property
    def head(self) -> int:
        """Trained parameters of the head."""
        rank = self.rank
        return -(-rank.model.vocab // rank.layout.tp) * rank.hidden if self.rest.dense else 0

    def fixed(self) -> Parts:
        """All that stays through the passes of a step, gradients aside."""
        return total(
            self.parts,
            {"gradient placeholders": self.placeholders, "workspaces": self.workspaces},
        )
