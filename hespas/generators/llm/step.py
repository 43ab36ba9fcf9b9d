"""One optimizer step of a language model as a workload: one rank class per pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hespas.generators.llm.layout import Layout, check_layout
from hespas.generators.llm.model import Model
from hespas.generators.llm.settings import Training
from hespas.generators.llm.stage import stage_graph
from hespas.graph import Workload

__all__ = ["training_workload"]


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
        return Workload.spmd(graphs[0], layout.ranks, metadata)
    ranks = np.repeat(np.arange(layout.pp, dtype=np.int32), layout.ranks // layout.pp)
    return Workload(name=model.name, classes=graphs, rank_class=ranks, metadata=metadata or {})
