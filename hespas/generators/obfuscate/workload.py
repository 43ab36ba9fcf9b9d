"""Obfuscation of a workload up to a level."""

from __future__ import annotations

from dataclasses import dataclass

from hespas.generators.obfuscate.keys import Key
from hespas.generators.obfuscate.layers import change_layers
from hespas.generators.obfuscate.levels import Level
from hespas.generators.obfuscate.names import hide_names
from hespas.generators.obfuscate.shapes import round_shapes
from hespas.graph import Diagnostics, Workload

__all__ = ["Obfuscate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Obfuscate:
    """Pass that hides what identifies a model, up to a level.

    ``names`` keeps topology, shapes and costs exactly. ``shapes`` also rounds extents to powers of two and
    changes each cost by at most 3.1 %. ``layers`` also levels operations between communications, changes the
    number of repeated layers (unless ``keeps_layers``) and moves costs between operations, with equal sums.
    """

    key: Key
    level: Level = "names"
    keeps_layers: bool = False

    def __call__(self, workload: Workload, diagnostics: Diagnostics) -> Workload:
        """Return the obfuscated workload. O(nodes)."""
        hidden = hide_names(workload, self.key, diagnostics)
        if self.level == "layers":
            hidden = change_layers(hidden, self.key, diagnostics, keeps_layers=self.keeps_layers)
        return hidden if self.level == "names" else round_shapes(hidden)
