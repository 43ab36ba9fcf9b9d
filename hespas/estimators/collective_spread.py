"""How far off answers are that were carried over: what intervals of collectives are widened by.

Logarithms, so that 90 % of what was left out of a fit lie inside: ``python -m
benchmarks.carry_over.collectives --split calib``. Causes that have nothing to do with each other add up as
squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot
from typing import NamedTuple

import numpy as np

from hespas.estimators.link_roofs import Layout, link_of
from hespas.graph.columns import FloatArray
from hespas.hardware import Device

__all__ = [
    "BETWEEN",
    "NO_BAND",
    "OF_HOST",
    "OF_KIN",
    "OF_MODEL",
    "OF_RELEASE",
    "PER_DOUBLING",
    "PER_OCTAVE",
    "Spread",
    "widened",
    "wiring_of",
]


class Spread(NamedTuple):
    """Logarithms below and above a prediction."""

    below: float
    above: float

    def times(self, count: float) -> Spread:
        """So many of it."""
        return Spread(self.below * count, self.above * count)

    def beside(self, other: Spread) -> Spread:
        """Together with another cause."""
        return Spread(hypot(self.below, other.below), hypot(self.above, other.above))


def widened(times: FloatArray, spread: Spread, count: FloatArray | float = 1.0) -> FloatArray:
    """Times with wider intervals, shape ``(3, ops)``: by ``count`` (a number or one for each) of a spread."""
    with np.errstate(over="ignore"):  # far beyond what was sampled, an interval may have no end
        return np.stack(
            (times[0], times[1] * np.exp(-spread.below * count), times[2] * np.exp(spread.above * count))
        )


def wiring_of(device: Device, layout: Layout) -> str:
    """What joins the ranks of a layout: inside a node a ``switch``, other links of their own (``mesh``) or
    those of the ``host``; else ``nodes``.
    """
    if layout.nodes > 1:
        return "nodes"
    link = link_of(device, layout)
    if link is None or link.kind != "scale_up":
        return "host"
    return "switch" if link.topology == "switch" else "mesh"


PER_OCTAVE: Mapping[str, Spread] = {
    "switch": Spread(0.17, 0.17),
    "mesh": Spread(0.1, 0.1),
    "host": Spread(0.1, 0.1),
    "nodes": Spread(0.4, 0.4),
}
"""For each octave of bytes beyond the fitted ones."""

PER_DOUBLING: Mapping[str, Spread] = {
    "switch": Spread(0.2, 0.2),
    "mesh": Spread(0.5, 0.5),
    "host": Spread(0.5, 1.4),
    "nodes": Spread(0.9, 0.9),
}
"""For each doubling of ranks or nodes beyond the fitted ones."""

BETWEEN: Mapping[str, Spread] = {
    "switch": Spread(0.1, 0.1),
    "mesh": Spread(0.4, 0.4),
    "host": Spread(0.4, 0.4),
    "nodes": Spread(0.42, 0.42),
}
"""For each doubling of ranks to the nearest fitted number where there are fewer and more."""

OF_KIN: Mapping[str, Spread] = {
    "sibling": Spread(0.22, 0.22),
    "family": Spread(0.6, 0.6),
    "link data": Spread(1.0, 1.0),
}
"""For the device that fits are of, the nearest kinship first."""

OF_RELEASE = Spread(0.2, 0.2)
"""For another release or library than the one asked."""

OF_MODEL = Spread(0.5, 1.0)
"""For NCCL's model where no fit is near, and for data sheets."""

OF_HOST: Mapping[str, Spread] = {
    "switch": Spread(0.0, 0.0),
    "mesh": Spread(0.0, 0.0),
    "host": Spread(2.0, 2.4),
    "nodes": Spread(0.7, 1.8),
}
"""For what a device's file does not say: how a host joins more than two ranks without a switch, and what of
its interfaces a cluster's network lets through.
"""

NO_BAND = Spread(0.25, 0.25)
"""Of a fit that had too few rows to say how far off it is."""
