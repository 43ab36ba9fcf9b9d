"""Workloads of language models, in training or serving, at any parallelism."""

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
