"""A PyTorch program -> workload: what ranks of a mesh dispatch, recorded without devices or other ranks.

``recorder`` (with ``storages``, ``places``, ``arguments``) and ``world`` need PyTorch, the extra ``torch``;
``calls`` is what they hand over, and the rest (``builder``, ``groups``, ``costs``, ``classes``) goes without.
"""

from __future__ import annotations

from hespas.captures.torch.program import TensorKind, capture_torch, record_rank

__all__ = ["TensorKind", "capture_torch", "record_rank"]
