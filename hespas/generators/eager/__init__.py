"""Transformers as PyTorch runs them operator by operator, on one device: forward, and backward where asked.

What other generators take for one kernel (attention, an activation) is here the operators that a framework
without a compiler launches, with the copies that its views force on products.
"""

from hespas.generators.eager.model import EagerModel, eager_model, eager_models
from hespas.generators.eager.step import EagerStep

__all__ = ["EagerModel", "EagerStep", "eager_model", "eager_models"]
