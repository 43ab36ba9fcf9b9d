"""What each operation costs: the one table that the StableHLO and HLO readers share."""

from __future__ import annotations

from hespas.costs.collectives import COLLECTIVE_KINDS, Payload, payload, reduction_flops
from hespas.costs.contraction import config_precision, named_algorithm
from hespas.costs.convolution import valid_positions
from hespas.costs.cost import FREE, Contraction, Cost, Rule, branch_ns, unknown_cost
from hespas.costs.custom_calls import FREE_TARGETS, is_known_target
from hespas.costs.facts import (
    Body,
    BroadcastFacts,
    ConvFacts,
    CustomFacts,
    DotFacts,
    EinsumFacts,
    Facts,
    FftFacts,
    MapFacts,
    Operation,
    Precision,
    RaggedDotFacts,
    ReduceFacts,
    ScanFacts,
    ScatterFacts,
    SelectScatterFacts,
    SolveFacts,
    SortFacts,
    Tensor,
    TopKFacts,
    UpdateFacts,
    WindowDim,
    WindowFacts,
)
from hespas.costs.macs import with_macs
from hespas.costs.table import HLO_ALIASES, TABLE, canonical_name, cost_of, find_rule

__all__ = [
    "COLLECTIVE_KINDS",
    "FREE",
    "FREE_TARGETS",
    "HLO_ALIASES",
    "TABLE",
    "Body",
    "BroadcastFacts",
    "Contraction",
    "ConvFacts",
    "Cost",
    "CustomFacts",
    "DotFacts",
    "EinsumFacts",
    "Facts",
    "FftFacts",
    "MapFacts",
    "Operation",
    "Payload",
    "Precision",
    "RaggedDotFacts",
    "ReduceFacts",
    "Rule",
    "ScanFacts",
    "ScatterFacts",
    "SelectScatterFacts",
    "SolveFacts",
    "SortFacts",
    "Tensor",
    "TopKFacts",
    "UpdateFacts",
    "WindowDim",
    "WindowFacts",
    "branch_ns",
    "canonical_name",
    "config_precision",
    "cost_of",
    "find_rule",
    "is_known_target",
    "named_algorithm",
    "payload",
    "reduction_flops",
    "unknown_cost",
    "valid_positions",
    "with_macs",
]
