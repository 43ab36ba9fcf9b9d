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
from hespas.graph import PROGRAM_BYTES, Workload

__all__ = ["LlmStep", "training_workload"]


def training_workload(
    model: Model, layout: Layout, training: Training, metadata: Mapping[str, str] | None = None
) -> Workload:
    """A step of ``model`` on ``layout.ranks`` ranks. Equal arguments give equal workloads.

    Raises ``UsageError`` that names the rule which a layout breaks. O(nodes of all stages + ranks).
    """
    check_layout(model, layout, training)
    stages = range(layout.pp)
    graphs = tuple(
        stage_graph(model, layout, training, stage, f"{model.name}.stage{stage}") for stage in stages
    )
    if layout.pp == 1:
        return Workload.spmd(replace(graphs[0], name=model.name), layout.ranks, metadata)
    ranks = np.repeat(np.arange(layout.pp, dtype=np.int32), layout.ranks // layout.pp)
    return Workload(name=model.name, classes=graphs, rank_class=ranks, metadata=metadata or {})


_STATES = ("weights", "master weights", "optimizer moments", "gradients")
"""Parts of the memory account that stay from step to step."""


@dataclass(frozen=True, kw_only=True)
class LlmStep:
    """An optimizer step of a language model: a generator."""

    model: Model
    layout: Layout
    training: Training

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
        return training_workload(self.model, self.layout, self.training, {PROGRAM_BYTES: ";".join(held)})

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
