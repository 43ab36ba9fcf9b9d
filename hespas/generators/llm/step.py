"""One optimizer step of a language model as a workload: one rank class per pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hespas.generators.llm.flops import hardware_flops, model_flops
from hespas.generators.llm.layout import Layout, check_layout
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Model, model_parameters
from hespas.generators.llm.settings import Training
from hespas.generators.llm.stage import stage_graph
from hespas.generators.spec import Account
from hespas.graph import PROGRAM_BYTES, StepFacts, Workload

__all__ = ["Board", "LlmStep", "training_facts", "training_workload"]


def training_workload(
    model: Model, layout: Layout, training: Training, metadata: Mapping[str, str] | None = None
) -> Workload:
    """A step of ``model`` on ``layout.ranks`` ranks. Equal arguments give equal workloads. Its metadata has
    the facts of the step, unless ``metadata`` states others.

    Raises ``UsageError`` that names the rule which a layout breaks. O(nodes of all stages + ranks).
    """
    check_layout(model, layout, training)
    metadata = replace(training_facts(model, training), ranks=layout.ranks).metadata() | dict(metadata or {})
    stages = range(layout.pp)
    graphs = tuple(
        stage_graph(model, layout, training, stage, f"{model.name}.stage{stage}") for stage in stages
    )
    if layout.pp == 1:
        return Workload.spmd(replace(graphs[0], name=model.name), layout.ranks, metadata)
    ranks = np.repeat(np.arange(layout.pp, dtype=np.int32), layout.ranks // layout.pp)
    return Workload(name=model.name, classes=graphs, rank_class=ranks, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A board that differs from its device file: its power limit (0: that of the file), and the bandwidth of
    its memory over the file's.
    """

    device: str
    power_w: float = 0.0
    bandwidth: float = 1.0


def training_facts(model: Model, training: Training, board: Board | None = None) -> StepFacts:
    """Return what simulators need of a step beside its graph."""
    library = training.library or ("flash2" if training.style == "torchtitan" else "cudnn")
    facts = StepFacts(
        kind="training",
        model_flops=float(model_flops(model, training)),
        tokens=float(training.global_batch * training.seq),
        dtype="tf32" if training.precision.tf32 else training.precision.matmul,
        launch="whole" if training.style == "maxtext" else training.launch,
        reads_counts=training.capacity == 0,
        library=library,
        compiled=training.compiled,
    )
    if board is None:
        return facts
    return replace(facts, device=board.device, power_w=board.power_w, bandwidth=board.bandwidth)


_STATES = ("weights", "master weights", "optimizer moments", "gradients")
"""Parts of the memory account that stay from step to step."""


@dataclass(frozen=True, kw_only=True)
class LlmStep:
    """An optimizer step of a language model: a generator."""

    model: Model
    layout: Layout
    training: Training
    board: Board | None = None

    @property
    def name(self) -> str:
        """The model and its layout."""
        return self.model.name

    def workload(self) -> Workload:
        """Return the step of all ranks. States, which are not values of the step, are stated as what it
        writes over, with the peak memory of each stage. Raises ``UsageError`` that names the rule which a
        layout breaks.
        """
        check_layout(self.model, self.layout, self.training)
        held: list[str] = []
        for stage in memory_of(self.model, self.layout, self.training):
            size = sum(stage.parts.get(each, 0) for each in _STATES)
            held.append(f"{size} {size} {size} {stage.peak_bytes}")
        facts = replace(training_facts(self.model, self.training, self.board), ranks=self.layout.ranks)
        metadata = facts.metadata() | {PROGRAM_BYTES: ";".join(held)}
        return training_workload(self.model, self.layout, self.training, metadata)

    def account(self) -> Account:
        """Parameters of the model; FLOPs of all ranks; memory of the fullest. Raises ``UsageError`` that
        names the rule which a layout breaks.
        """
        check_layout(self.model, self.layout, self.training)
        fullest = max(memory_of(self.model, self.layout, self.training), key=lambda each: each.peak_bytes)
        return Account(
            parameters=model_parameters(self.model),
            model_flops_per_step=model_flops(self.model, self.training),
            hardware_flops_per_step=hardware_flops(self.model, self.training, self.layout),
            peak_memory_bytes=float(fullest.peak_bytes),
            memory=fullest.filling,
        )
