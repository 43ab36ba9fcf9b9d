"""Obfuscation of workloads: the same structure and times without the names, shapes and counts that identify
a model. The modules are imported when they are needed, because most conversions hide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hespas.graph import Diagnostics, Workload
from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.generators.obfuscate.keys import Key, load_key
    from hespas.generators.obfuscate.names import hide_profile_names, reveal_names

__all__ = [
    "Key",
    "Level",
    "Obfuscate",
    "VisibleFact",
    "hide_profile_names",
    "load_key",
    "reveal_names",
]

Level = Literal["names", "shapes", "layers"]
"""What an obfuscation hides: names; also exact shapes and costs; also the layers of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleFact:
    """Fact that a workload shows: the number of distinct values, some of them as text, and the number of
    built-in models that agree with it (-1: it does not depend on the model).
    """

    fact: str
    distinct: int
    examples: str
    models: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Obfuscate:
    """Pass that hides what identifies a model, up to a level.

    ``names`` keeps topology, shapes and costs exactly. ``shapes`` also rounds extents to powers of two and
    changes each cost by at most 3.1 %. ``layers`` also levels operations between communications, changes the
    number of repeated layers (unless ``keeps_layers``) and moves costs between operations, with close sums.
    """

    key: Key
    level: Level = "names"
    keeps_layers: bool = False

    def __call__(self, workload: Workload, diagnostics: Diagnostics) -> Workload:
        """Return the obfuscated workload. O(nodes)."""
        from hespas.generators.obfuscate.layers import change_layers
        from hespas.generators.obfuscate.names import hide_names
        from hespas.generators.obfuscate.shapes import round_shapes

        hidden = hide_names(workload, self.key, diagnostics)
        if self.level == "layers":
            hidden = change_layers(hidden, self.key, diagnostics, keeps_layers=self.keeps_layers)
        return hidden if self.level == "names" else round_shapes(hidden)


__getattr__ = lazy_names(
    __name__,
    keys=("Key", "load_key"),
    names=("hide_profile_names", "reveal_names"),
)
