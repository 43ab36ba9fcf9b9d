"""Workloads of language models, in training or serving, at any parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.generators.llm.layout import Layout
    from hespas.generators.llm.model import Model
    from hespas.generators.llm.model_file import load_model, model_names, named_model
    from hespas.generators.llm.published import row_of
    from hespas.generators.llm.serving import ServingStep, serving_layout
    from hespas.generators.llm.settings import Overlap, Training, offload_of, precision_of, recompute_of
    from hespas.generators.llm.step import LlmStep, training_workload

__all__ = [
    "Layout",
    "LlmStep",
    "Model",
    "Overlap",
    "ServingStep",
    "Training",
    "load_model",
    "model_names",
    "named_model",
    "offload_of",
    "precision_of",
    "recompute_of",
    "row_of",
    "serving_layout",
    "training_workload",
]

__getattr__ = lazy_names(
    __name__,
    layout=("Layout",),
    model=("Model",),
    model_file=(
        "load_model",
        "model_names",
        "named_model",
    ),
    published=("row_of",),
    serving=(
        "ServingStep",
        "serving_layout",
    ),
    settings=(
        "Overlap",
        "Training",
        "offload_of",
        "precision_of",
        "recompute_of",
    ),
    step=(
        "LlmStep",
        "training_workload",
    ),
)
