"""Array simulators of others, run as programs of their own, one product at a time."""

from __future__ import annotations

from hespas.estimators.external.cocossim import Cocossim
from hespas.estimators.external.onnxim import Onnxim
from hespas.estimators.external.scale_sim import ScaleSim
from hespas.estimators.external.zigzag import ZigZag

__all__ = ["Cocossim", "Onnxim", "ScaleSim", "ZigZag"]
