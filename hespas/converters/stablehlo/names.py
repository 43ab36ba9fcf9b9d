"""Operation names as the cost table spells them.

An operation that bears a name of the table but no dialect is none of StableHLO's: it may stand in a program,
and nothing is known of it.
"""

from __future__ import annotations

from hespas.converters.costs import Cost, canonical_name, cost_of, find_rule, unknown_cost
from hespas.converters.costs import Operation as CostInput

__all__ = ["has_rule", "price", "short_name", "table_name"]

_DIALECTS = ("stablehlo.", "mhlo.")


def table_name(op_name: str) -> str:
    """The name in the cost table (any name where the table has none), ``""`` without a dialect."""
    return canonical_name(op_name) if "." in op_name else ""


def short_name(op_name: str) -> str:
    """An operation of StableHLO or MHLO without its dialect, ``""`` for any other."""
    return op_name.partition(".")[2] if op_name.startswith(_DIALECTS) else ""


def has_rule(op_name: str) -> bool:
    """Whether the cost table has the operation."""
    return "." in op_name and find_rule(op_name) is not None


def price(op_name: str, described: CostInput) -> Cost:
    """The cost of one operation: of class UNKNOWN where the table does not have it."""
    return cost_of(op_name, described) if "." in op_name else unknown_cost(described)
