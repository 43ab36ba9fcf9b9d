"""Transformers as PyTorch runs them operator by operator on one device: forward, and optionally backward.

Other generators write one kernel for attention or an activation function; here they are the operators that a
framework without a compiler launches, including the copies that products of views need.
"""

from hespas.generators.eager.model import EagerModel, EagerStep, eager_model, eager_models

__all__ = ["EagerModel", "EagerStep", "eager_model", "eager_models"]
