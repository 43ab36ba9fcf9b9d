"""Obfuscation of workloads: the same structure and times without the names, shapes and counts that identify
a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.generators.obfuscate.keys import Key, load_key
    from hespas.generators.obfuscate.levels import Level, VisibleFact
    from hespas.generators.obfuscate.names import hide_profile_names, reveal_names
    from hespas.generators.obfuscate.workload import Obfuscate

__all__ = [
    "Key",
    "Level",
    "Obfuscate",
    "VisibleFact",
    "hide_profile_names",
    "load_key",
    "reveal_names",
]

__getattr__ = lazy_names(
    __name__,
    keys=("Key", "load_key"),
    levels=("Level", "VisibleFact"),
    names=("hide_profile_names", "reveal_names"),
    workload=("Obfuscate",),
)
