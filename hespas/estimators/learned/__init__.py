"""Learned estimators: gradient-boosted trees that were fitted to measurements and are stored as arrays with a
card that describes them.
"""

from __future__ import annotations

from hespas.estimators.learned.inference import Learned

__all__ = ["Learned"]
