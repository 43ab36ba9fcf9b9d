"""A step of a transformer on one device, as PyTorch runs it."""

from __future__ import annotations

from dataclasses import dataclass

from hespas.generators.eager.kernels import Operators
from hespas.generators.eager.layers import Layers
from hespas.generators.eager.model import EagerModel
from hespas.generators.spec import Account, Bounded
from hespas.graph import GraphBuilder, StepFacts, Workload
from hespas.graph.errors import UsageError

__all__ = ["EagerStep"]

_MOST_ELEMENTS, _MOST_LAYERS = 1 << 50, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStep(Bounded):
    """``batch`` sequences of ``length`` tokens: forward, and where ``training`` the backward pass of a loss
    (gradients are added to those of the step before; there is no optimizer). ``compiled``: operators between
    products are fused as TorchInductor fuses them; forward only.
    """

    model: EagerModel
    batch: int = 1
    length: int = 1024
    training: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """Model, what is done, and sizes."""
        what = "train" if self.training else "compiled" if self.compiled else "forward"
        return f"{self.model.name}-{what}-{self.length}-{self.batch}"

    def workload(self) -> Workload:
        """One rank. Raises ``UsageError`` for sizes below 1, too large, or for a compiled training step."""
        model = self.model
        model.check()
        if min(self.batch, self.length) < 1:
            raise UsageError("a step has at least one sequence of one token", hint="`batch`, `length`")
        if self.training and self.compiled:
            raise UsageError("compiled steps are forward only", hint="`compiled=False`")
        if model.positions and self.length > model.positions:
            raise UsageError(
                f"{model.name} has {model.positions:,} positions, a sequence {self.length:,} tokens",
                hint="a shorter `length`",
            )
        scores = self.batch * model.heads * self.length**2
        if model.layers > _MOST_LAYERS or scores > _MOST_ELEMENTS:
            raise UsageError(
                f"more than {_MOST_LAYERS:,} layers or 2**50 scores of attention", hint="smaller sizes"
            )
        builder = GraphBuilder(self.name)
        ops = Operators(builder, self.training, self.compiled)
        Layers(model, ops, self.batch, self.length).run()
        ops.backward()
        facts = StepFacts(
            kind="eager",
            model_flops=self.account().model_flops_per_step,
            ranks=1,
            tokens=float(self.batch * self.length),
            dtype="f32",
        )
        return Workload.spmd(builder.build(), 1, facts.metadata())

    def account(self) -> Account:
        """FLOPs of products; backward has two for each of forward. Memory is not accounted for."""
        forward = self.model.forward_flops(self.batch, self.length, training=self.training)
        flops = forward * (3.0 if self.training else 1.0)
        return Account(
            parameters=float(self.model.parameters), model_flops_per_step=flops, hardware_flops_per_step=flops
        )
