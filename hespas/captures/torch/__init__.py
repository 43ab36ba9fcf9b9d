"""Capture of a PyTorch program as a workload: operations dispatched by ranks of a mesh, without devices.

``recorder``, ``tensors`` and ``world`` need PyTorch, the extra ``torch``. ``calls`` holds the recorded data;
``builder`` and ``classes`` process it without PyTorch.
"""

from __future__ import annotations

from hespas.captures.torch.program import TensorKind, capture_torch, record_rank

__all__ = ["TensorKind", "capture_torch", "record_rank"]
