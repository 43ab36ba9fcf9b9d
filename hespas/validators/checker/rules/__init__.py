"""Table of the rules: code, title, scope, severity under each profile, and function.

Codes ``ETnnn`` are rules of the Chakra contract (its reader checks some of them), ``GRnnn`` rules of graphs
in any format, ``PRnnn`` rules of recordings. Adding a rule is one function and one row.
"""

from __future__ import annotations

from hespas.graph import Severity
from hespas.graph.errors import InvariantError
from hespas.graph.quantised import OVERFLOW
from hespas.measurements.consistency import JOB_RULES, RECORDING_RULES
from hespas.validators.checker.job import Check, CheckRule, Need, Scope
from hespas.validators.checker.rules import collectives, messages, nodes, order
from hespas.validators.checker.rules import configuration as conf

__all__ = ["RULES", "find_rule", "rule"]

_FILE, _RANK, _SET = Scope.FILE, Scope.RANK, Scope.SET
_LEVELS = {"E": Severity.ERROR, "W": Severity.WARNING, "-": None}


def rule(
    code: str, title: str, scope: Scope, levels: str, check: Check | None = None, *needs: Need
) -> CheckRule:
    """Return a row of the table of rules. ``levels`` has three letters, the severities without a profile,
    under ``chakra`` and under ``astra-sim``: E (error), W (warning) or - (not checked).
    """
    if len(levels) != 3 or not _LEVELS.keys() >= set(levels):
        raise InvariantError(f"rule {code} ({title}): severities {levels!r} are not three of E, W and -")
    plain, chakra, astra_sim = (_LEVELS[level] for level in levels)
    return CheckRule(code, title, scope, plain, chakra, astra_sim, check, needs)


def _conf(code: str, title: str, levels: str, check: Check | None, *needs: Need) -> CheckRule:
    return rule(code, title, Scope.CONFIGURATION, levels, check, *needs)


# In the order of checking: later rules depend on the outcome of earlier ones.
RULES: tuple[CheckRule, ...] = (
    rule("ET001", "frames decode to the exact end of the file", _FILE, "EEE"),
    rule("ET002", "the file has metadata first and at least one node", _FILE, "EEE"),
    rule("ET003", "the schema is recognised", _FILE, "EEE"),
    rule("ET004", "the version label is known, no frame is empty", _FILE, "WWW"),
    rule("ET005", "node ids are unique", _RANK, "EEE", nodes.unique_ids),
    rule("ET006", "every dependency exists", _RANK, "EEE"),
    rule("ET007", "no dependency cycle", _RANK, "EEE", nodes.acyclic),
    rule("ET008", "no dependency is listed twice", _RANK, "WWW", nodes.no_duplicate_dependency),
    rule("ET009", "the node type is known and can be run", _RANK, "EEE", nodes.known_kind),
    rule("ET010", "attributes have their canonical types", _RANK, "WWW"),
    rule("ET011", "a collective states kind and size", _RANK, "WEE", collectives.collective_described),
    rule("ET012", "communication has at least one byte", _RANK, "WEE", collectives.positive_size),
    rule("GR001", "costs are neither negative nor infinite", _RANK, "EEE", nodes.legal_costs),
    rule("GR002", "sizes of a collective fit its kind", _RANK, "WWW", collectives.sizes_fit_kind),
    rule("GR003", "durations are ns and sizes whole bytes", _RANK, "WWW", nodes.plausible_units),
    rule("GR004", "communication and loops fit their nodes", _RANK, "EEE", nodes.tables_fit_nodes),
    rule("GR005", "what costs something takes time", _RANK, "W--", nodes.duration_where_work),
    rule("GR006", "loop trip counts are known", _RANK, "WWW", nodes.known_trips),
    rule("GR007", "tensor extents are not negative", _RANK, "EEE", nodes.tensor_types),
    rule(OVERFLOW, "sums of integer products fit their accumulator", _RANK, "WWW", nodes.accumulators_fit),
    rule("GR009", "quantised types are legal and fit their tensors", _RANK, "EEE", nodes.quantised_types),
    rule("ET014", "a message states peer, tag, size", _RANK, "WEE", messages.messages_described),
    rule("ET016", "communication is not a CPU operation", _RANK, "-EE", nodes.communication_on_host),
    rule("ET017", "no compute node on the CPU", _RANK, "--E", nodes.compute_on_host),
    rule("ET018", "process groups are named by integers", _SET, "-WE", collectives.group_names_known),
    rule("ET019", "groups are legal, issuers are members", _SET, "EEE", collectives.groups_legal),
    rule("ET023", "compute takes time", _RANK, "-WW", nodes.positive_duration),
    rule("ET030", "the graph is of a plausible shape", _RANK, "-WW", nodes.plausible_shape),
    rule("ET036", "tags stay below the modulus", _RANK, "-WW", messages.tags_distinct),
    rule("ET015", "sends and receives match", _SET, "EEE", messages.messages_matched),
    rule("ET020", "a group issues one sequence", _SET, "EEE", order.same_sequence),
    rule("ET021", "orders do not deadlock", _SET, "EEE", order.no_deadlock),
    rule("ET029", "equal streams before world collectives", _SET, "--E", order.same_streams),
    rule("ET028", "group ids are distinct", _SET, "--W", collectives.group_ids_distinct),
    _conf("ET022", "one trace per rank of the job and network", "--E", conf.as_many_ranks_as_network),
    _conf("ET013", "collectives are not smaller than their splits", "--E", conf.chunks_not_empty, "system"),
    _conf("ET024", "roofline mode has FLOPs and bytes", "--E", conf.roofline_costs, "system"),
    _conf("ET033", "memory tracking has lists of tensors", "--E", conf.memory_lists, "system"),
    _conf("ET025", "algorithms fit group sizes", "--E", conf.algorithms_fit, "system", "network"),
    _conf("ET026", "the system configuration is complete", "--E", conf.system_complete, "system"),
    _conf("ET027", "memory nodes have a memory", "--E", conf.remote_memory_there),
    _conf("ET031", "one group per collective on a 1-D network", "--W", conf.few_groups_on_1d, "network"),
    _conf("ET032", "the backend takes the network", "--W", conf.backend_fits_network, "network"),
    _conf("ET034", "no message ends a rank with other times", "--E", None, "system", "network"),
    _conf("ET035", "no event of 0 ns at the start", "--E", None, "system", "network"),
    # Checked by every command that reads a recording
    *(rule(code, title, _FILE, "WWW") for code, title in RECORDING_RULES.items()),
    *(rule(code, title, _SET, "WWW") for code, title in JOB_RULES.items()),
)


def find_rule(code: str) -> CheckRule | None:
    """Return the rule with a code; None if no rule has it."""
    return next((rule for rule in RULES if rule.code == code), None)
