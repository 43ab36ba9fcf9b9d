"""The table of rules: what is checked, how much it matters under each profile, and by which function.

Codes ``ETnnn`` are those of the Chakra contract (``ET001`` to ``ET012`` partly found by the reader of the
format); ``GRnnn`` are rules of the graph that hold for every format. Adding a rule is one function and one
row.
"""

from __future__ import annotations

from hespas.graph import Severity
from hespas.validators.checker.job import Rule, Scope
from hespas.validators.checker.rules import collectives, configuration, messages, nodes, order

__all__ = ["RULES", "find_rule"]

_E, _W = Severity.ERROR, Severity.WARNING
_FILE, _RANK, _SET, _CONF = Scope.FILE, Scope.RANK, Scope.SET, Scope.CONFIGURATION

# Order is the order of checking: later rules ask whether earlier ones found something.
# code, title, scope, severity without profile / chakra / astra-sim, function, configuration it needs
RULES: tuple[Rule, ...] = (
    Rule("ET001", "frames decode to the exact end of the file", _FILE, _E, _E, _E),
    Rule("ET002", "the file has metadata first and at least one node", _FILE, _E, _E, _E),
    Rule("ET003", "the schema is recognised", _FILE, _E, _E, _E),
    Rule("ET004", "the version label is known, no frame is empty", _FILE, _W, _W, _W),
    Rule("ET005", "node ids are unique", _RANK, _E, _E, _E, nodes.unique_ids),
    Rule("ET006", "every dependency exists", _RANK, _E, _E, _E),
    Rule("ET007", "no dependency cycle", _RANK, _E, _E, _E, nodes.acyclic),
    Rule("ET008", "no dependency is listed twice", _RANK, _W, _W, _W, nodes.no_duplicate_dependency),
    Rule("ET009", "the node type is known and can be run", _RANK, _E, _E, _E, nodes.known_kind),
    Rule("ET010", "attributes have their canonical types", _RANK, _W, _W, _W),
    Rule(
        "ET011", "a collective states kind and size", _RANK, _W, _E, _E, collectives.collective_described
    ),
    Rule("ET012", "communication has at least one byte", _RANK, _W, _E, _E, collectives.positive_size),
    Rule("GR001", "costs are neither negative nor infinite", _RANK, _E, _E, _E, nodes.legal_costs),
    Rule("GR002", "sizes of a collective fit its kind", _RANK, _W, _W, _W, collectives.sizes_fit_kind),
    Rule("GR003", "durations are ns and sizes whole bytes", _RANK, _W, _W, _W, nodes.plausible_units),
    Rule("GR004", "communication and loops fit their nodes", _RANK, _E, _E, _E, nodes.tables_fit_nodes),
    Rule("GR005", "what costs something takes time", _RANK, _W, None, None, nodes.duration_where_work),
    Rule("GR006", "loop trip counts are known", _RANK, _W, _W, _W, nodes.known_trips),
    Rule("GR007", "tensor extents are not negative", _RANK, _E, _E, _E, nodes.tensor_types),
    Rule("ET014", "a message states peer, tag, size", _RANK, _W, _E, _E, messages.messages_described),
    Rule("ET016", "communication is no CPU operation", _RANK, None, _E, _E, nodes.communication_on_host),
    Rule("ET017", "no compute node on the CPU", _RANK, None, None, _E, nodes.compute_on_host),
    Rule("ET018", "process groups are named by integers", _SET, None, _W, _E, collectives.group_names_known),
    Rule("ET019", "groups are legal, issuers are members", _SET, _E, _E, _E, collectives.groups_legal),
    Rule("ET023", "compute takes time", _RANK, None, _W, _W, nodes.positive_duration),
    Rule("ET030", "the graph is of a plausible shape", _RANK, None, _W, _W, nodes.plausible_shape),
    Rule("ET030", "tags stay below the modulus", _RANK, None, _W, _W, messages.tags_distinct),
    Rule("ET015", "sends and receives match", _SET, _E, _E, _E, messages.messages_matched),
    Rule("ET020", "a group issues one sequence", _SET, _E, _E, _E, order.same_sequence),
    Rule("ET021", "orders do not deadlock", _SET, _E, _E, _E, order.no_deadlock),
    Rule("ET029", "equal streams before world collectives", _SET, None, None, _E, order.same_streams),
    Rule("ET028", "group ids can be told apart", _SET, None, None, _W, collectives.group_ids_distinct),
    Rule(
        "ET022", "one trace per rank of the network", _CONF, None, None, _E,
        configuration.as_many_ranks_as_network, ("network",),
    ),
    Rule(
        "ET013", "collectives are not smaller than their splits", _CONF, None, None, _E,
        configuration.chunks_not_empty, ("system",),
    ),
    Rule(
        "ET024", "roofline mode has FLOPs and bytes", _CONF, None, None, _E,
        configuration.roofline_costs, ("system",),
    ),
    Rule(
        "ET033", "memory tracking has lists of tensors", _CONF, None, None, _E,
        configuration.memory_lists, ("system",),
    ),
    Rule(
        "ET025", "algorithms fit group sizes", _CONF, None, None, _E,
        configuration.algorithms_fit, ("system", "network"),
    ),
    Rule(
        "ET026", "the system configuration is complete", _CONF, None, None, _E,
        configuration.system_complete, ("system",),
    ),
    Rule(
        "ET027", "memory nodes have a memory", _CONF, None, None, _E, configuration.remote_memory_there
    ),
    Rule(
        "ET031", "one group per collective on a 1-D network", _CONF, None, None, _W,
        configuration.few_groups_on_one_dimension, ("network",),
    ),
    Rule(
        "ET032", "the backend takes the network", _CONF, None, None, _W,
        configuration.backend_fits_network, ("network",),
    ),
)  # fmt: skip


def find_rule(code: str) -> Rule | None:
    """The first row of a code, or None."""
    return next((rule for rule in RULES if rule.code == code), None)
