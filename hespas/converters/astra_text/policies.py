"""Parallelism policies of ASTRA-sim 1.0: whom the collectives of each phase concern.

Source: ``decode_involved_dimensions`` of ``astra-sim/workload/Workload.cc`` in release 1.0. There a policy
switches dimensions of the network on and off; dimension 0 is the innermost, whose ranks are neighbours.
"""

from __future__ import annotations

from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["ROLES", "TRANSFORMERS", "Policy", "Role", "Roles"]


class Policy(Enum):
    """The first word of a file."""

    DATA = "DATA"
    MODEL = "MODEL"
    HYBRID_DATA_MODEL = "HYBRID_DATA_MODEL"
    HYBRID_MODEL_DATA = "HYBRID_MODEL_DATA"
    HYBRID_DLRM = "HYBRID_DLRM"
    HYBRID_DLRM_ENHANCED = "HYBRID_DLRM_ENHANCED"
    HYBRID_TRANSFORMER = "HYBRID_TRANSFORMER"
    HYBRID_TRANSFORMER_FWD_IN_BCKWD = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
    HYBRID_CUSTOMIZED = "HYBRID_CUSTOMIZED"
    DISTRIBUTED_INFERENCE = "DISTRIBUTED_INFERENCE"
    MICRO = "MICRO"


TRANSFORMERS = frozenset({Policy.HYBRID_TRANSFORMER, Policy.HYBRID_TRANSFORMER_FWD_IN_BCKWD})
"""Policies that state how many ranks share one copy of the model."""


class Role(Enum):
    """The ranks that take part in a collective."""

    NOBODY = auto()
    """The collective is not run, whatever the file says."""
    WORLD = auto()
    INNER = auto()
    """Neighbours: the ranks of dimension 0, or of one copy of the model where the policy states its size."""
    OUTER = auto()
    """Ranks at the same place in each inner group."""


class Roles(NamedTuple):
    """Who takes part in the collectives of a layer."""

    forward: Role
    input_grad: Role
    weight_grad: Role


_DATA_PARALLEL = Roles(Role.NOBODY, Role.NOBODY, Role.WORLD)
_MODEL_PARALLEL = Roles(Role.WORLD, Role.WORLD, Role.NOBODY)
_MODEL_INSIDE = Roles(Role.INNER, Role.INNER, Role.OUTER)

ROLES: MappingProxyType[Policy, Roles] = MappingProxyType(
    {
        Policy.DATA: _DATA_PARALLEL,
        Policy.HYBRID_DLRM: _DATA_PARALLEL,
        Policy.HYBRID_DLRM_ENHANCED: _DATA_PARALLEL,
        Policy.MICRO: _DATA_PARALLEL,
        Policy.MODEL: _MODEL_PARALLEL,
        Policy.DISTRIBUTED_INFERENCE: _MODEL_PARALLEL,
        Policy.HYBRID_DATA_MODEL: _MODEL_INSIDE,
        Policy.HYBRID_MODEL_DATA: Roles(Role.OUTER, Role.OUTER, Role.INNER),
        Policy.HYBRID_TRANSFORMER: _MODEL_INSIDE,
        Policy.HYBRID_TRANSFORMER_FWD_IN_BCKWD: _MODEL_INSIDE,
    }
)
"""What each policy runs; the layers of a customised workload each name one of these."""
