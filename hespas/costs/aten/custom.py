"""User rules for operations without a built-in rule: files of formulas, and plug-ins.

``HESPAS_COST_RULES`` names TOML files, separated as in ``PATH``. Each ``[[op]]`` is one rule:

    [[op]]
    name = "mylib::gate_*"                  # an operation as traces name it; ``*`` is any text
    class = "contraction"                   # an OpClass, in any case
    product = ["1", "in0[0]", "in1[0]", "in0[1]"]   # batch, M, N, K, where it is a product
    flops = "2 * in0[0] * in0[1] * in1[0]"  # without it: of the product, else unknown
    transcendentals = "0"                   # without it: 0
    bytes_read = "bytes(in0) + bytes(in1)"  # without it: all tensors among the arguments
    bytes_written = "2 * in0[0] * in1[0]"   # without it: unknown
    composite = true                        # costs of recorded parts take precedence

Another package registers a mapping of names to rules (:data:`hespas.costs.aten.call.AtenRule`), or the path
of such a file, under the entry point group ``hespas.costs``. A user's file takes precedence over the built-in
table, which takes precedence over plug-ins.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isnan, nan
from pathlib import Path
from typing import cast

from hespas.costs.aten.call import AtenCost, AtenRule, Call, matrix_product, unknown
from hespas.costs.aten.formulas import Formula, FormulaError, parse_formula
from hespas.costs.operation import Contraction, Cost
from hespas.graph import OpClass
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, clipped
from hespas.graph.plugins import PluginTable, report_plugin_error

__all__ = ["VARIABLE", "UserRule", "forget_rules", "plugin_rule", "read_rules", "user_rule"]

VARIABLE = "HESPAS_COST_RULES"
"""The environment variable that names files of rules."""
_MOST_BYTES = 1 << 20
_MOST_RULES = 4096
_MOST_FILES = 64
_LARGEST = 1e21
"""Largest count; sums of such counts stay finite."""
_LARGEST_EXTENT = float(1 << 48)
"""Largest number of elements in an address space."""
_FIGURES = ("flops", "transcendentals", "bytes_read", "bytes_written")
_KEYS = frozenset({"name", "class", "product", "composite", *_FIGURES})
_PLUGINS = PluginTable("cost rules", "hespas.costs", {})


@dataclass(frozen=True, slots=True)
class UserRule:
    """Cost rule of a user. It applies to operations whose names contain the texts ``pieces`` in order, with
    any text between them.
    """

    pieces: tuple[str, ...]
    rule: AtenRule
    composite: bool

    def answers(self, name: str) -> bool:
        """Return True if the user's rule applies to the operation ``name``. O(length of the name)."""
        first, *rest = self.pieces
        if not rest:
            return name == first
        *middle, last = rest
        if not name.startswith(first) or not name.endswith(last):
            return False
        at, end = len(first), len(name) - len(last)
        for piece in middle:
            position = name.find(piece, at, end)
            if position < 0:
                return False
            at = position + len(piece)
        return at <= end


@dataclass(frozen=True, slots=True)
class _FormulaRule:
    """Cost rule of a user, from one ``[[op]]`` table of a TOML file. ``source`` is the file and the number of
    the table, for messages.
    """

    source: str
    op_class: OpClass
    formulas: Mapping[str, Formula]
    product: tuple[Formula, ...]

    def price(self, call: Call) -> AtenCost:
        """Return the cost of one operation. Impossible values of a formula become unknown, with a warning."""
        tensors = call.tensors
        row = self._product(call)
        figures = {name: self._count(name, formula, call) for name, formula in self.formulas.items()}
        figures = {name: figures.get(name, nan) for name in _FIGURES}
        if "flops" not in self.formulas and row is not None:
            figures["flops"] = row.flops
        if "transcendentals" not in self.formulas:
            figures["transcendentals"] = 0.0
        if "bytes_read" not in self.formulas:
            figures["bytes_read"] = sum(tensor.bytes for tensor in tensors)
        first = next((tensor.dtype for tensor in tensors if tensor.dtype is not None), None)
        cost = Cost(
            self.op_class,
            figures["flops"],
            figures["flops"],
            figures["transcendentals"],
            figures["bytes_read"],
            figures["bytes_written"],
            -1 if first is None else first.code,
            () if row is None else (row,),
        )
        return AtenCost(cost, tuple(tensor.plain for tensor in tensors))

    def _count(self, key: str, formula: Formula, call: Call, largest: float = _LARGEST) -> float:
        """Return the value of one formula (the key ``key`` of the rule) for an operation; NaN if unknown."""
        try:
            value = float(formula(call))
        except (ArithmeticError, ValueError) as error:
            fault = str(error)
        else:
            if isnan(value) or 0 <= value <= largest:
                return value
            fault = f"{value:g} is below 0" if value < 0 else f"{value:g} is more than {largest:g}"
        name = f"{self.source}, {key}"
        message = f"{name}: no count for {clipped(call.name)!r}, which stays unknown: {fault}"
        report_plugin_error("rule for costs", name, message)
        return nan

    def _product(self, call: Call) -> Contraction | None:
        extents = [self._count("product", formula, call, _LARGEST_EXTENT) for formula in self.product]
        if len(extents) != 4 or not all(extent.is_integer() for extent in extents):
            return None
        batch, m, n, k = map(int, extents)
        types = [tensor.dtype for tensor in call.tensors[:2]]
        lhs, rhs = (*types, None, None)[:2]
        return matrix_product((batch, m, n, k), (lhs, rhs, lhs))


def read_rules(path: Path) -> tuple[UserRule, ...]:
    """Return the rules of one file in order. Raises ``FormatError`` with the rule, the key and the character
    of a fault.
    """
    source = str(path)
    try:
        if not path.is_file():
            raise FileNotFoundError
        with path.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise FormatError(
            f"rules cannot be read: {error.strerror or 'no file'}",
            path=source,
            position=VARIABLE,
            hint=f"set {VARIABLE} to TOML files of cost rules",
        ) from error
    if len(text) > _MOST_BYTES:
        raise FormatError(
            f"has more than {_MOST_BYTES:,} bytes", path=source, position="file", hint="split it"
        )
    try:
        document = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of integers of thousands of digits
        raise FormatError(
            f"not TOML: {error}", path=source, position="file", hint="write each rule as [[op]]"
        ) from error
    listed = document.get("op", [])
    rows = cast("list[object]", listed) if isinstance(listed, list) else None
    others = sorted(document.keys() - {"op"})
    if rows is None or others or len(rows) > _MOST_RULES:
        fault = (
            f"{clipped(others[0])!r} is not known"
            if others
            else f"expected a list of at most {_MOST_RULES} [[op]]"
        )
        raise FormatError(fault, path=source, position="top level", hint="write each rule as [[op]]")
    return tuple(_rule(row, number, source) for number, row in enumerate(rows, 1))


def _rule(entry: object, number: int, path: str) -> UserRule:
    fault = partial(_fault, number=number, path=path)
    if not isinstance(entry, dict):
        raise fault("is not a table", "op")
    row = cast("dict[str, object]", entry)
    strange = sorted(row.keys() - _KEYS)
    if strange:
        raise fault(f"{clipped(strange[0])!r} is not known: there are {', '.join(sorted(_KEYS))}", strange[0])
    name, composite = row.get("name"), row.get("composite", False)
    if not isinstance(name, str) or not 0 < len(name) <= 1000:
        raise fault("expected a text: the operation as traces name it", "name")
    if not isinstance(composite, bool):
        raise fault("expected true or false", "composite")
    listed = str(row.get("class", "custom")).upper()
    if listed not in OpClass.__members__:
        raise fault(
            f"no class {clipped(listed.lower())!r}: {', '.join(entry.name.lower() for entry in OpClass)}",
            "class",
        )
    formulas = {key: _formula(row[key], key, fault) for key in _FIGURES if key in row}
    product = row.get("product", [])
    if not isinstance(product, list) or len(cast("list[object]", product)) not in (0, 4):
        raise fault("expected four formulas: batch, M, N, K", "product")
    extents = tuple(_formula(entry, "product", fault) for entry in cast("list[object]", product))
    parsed = _FormulaRule(f"{path}: [[op]] {number}", OpClass[listed], formulas, extents)
    return UserRule(tuple(name.split("*")), parsed.price, composite)


def _formula(text: object, key: str, fault: partial[FormatError]) -> Formula:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if abs(text) > _LARGEST:
            raise fault(f"a count is at most {_LARGEST:g}", key)
        text = str(text)
    if not isinstance(text, str):
        raise fault("expected a formula, as text", key)
    try:
        return parse_formula(text)
    except FormulaError as error:
        raise fault(f"{error}: {clipped(text)!r}", f"{key}, character {error.position + 1}") from error


def _fault(message: str, key: str, *, number: int, path: str) -> FormatError:
    return FormatError(
        message,
        path=path,
        position=f"[[op]] {number}, {clipped(key)}",
        hint="see the example in docs/how-to/cost-rules.md",
    )


@lru_cache(maxsize=8)
def _rules_of(value: str) -> tuple[UserRule, ...]:
    paths = [path for path in value.split(os.pathsep) if path]
    if len(paths) > _MOST_FILES:
        raise FormatError(
            f"names {len(paths):,} files of rules, more than {_MOST_FILES}",
            position=VARIABLE,
            hint="put the rules into fewer files",
        )
    return tuple(rule for path in paths for rule in read_rules(Path(path)))


def user_rule(name: str) -> UserRule | None:
    """Return the first user rule for an operation. Raises ``FormatError`` for invalid files."""
    value = os.environ.get(VARIABLE, "")
    rules = _rules_of(value) if value else ()
    return next((rule for rule in rules if rule.answers(name)), None)


def forget_rules() -> None:
    """Clear the caches of files and plug-ins, which are read once per process."""
    _rules_of.cache_clear()
    _plugin_rules.cache_clear()


@lru_cache(maxsize=1)
def _plugin_rules() -> tuple[UserRule, ...]:
    rules: list[UserRule] = []
    for name in sorted(_PLUGINS.plugins()):
        try:
            rules.extend(_PLUGINS.guarded(name, partial(_registered, name)))
        except HespasError:  # a failing plug-in must not stop others
            continue
    return tuple(rules)


def _registered(name: str) -> tuple[UserRule, ...]:
    target = _PLUGINS.load(name)
    if isinstance(target, (str, os.PathLike)):
        return read_rules(Path(cast("str", target)))
    rules = cast("Mapping[str, AtenRule]", target)
    return tuple(
        UserRule((op,), partial(_guarded, name, rule), composite=False) for op, rule in rules.items()
    )


def _guarded(name: str, rule: AtenRule, call: Call) -> AtenCost:
    """Return the cost by a plug-in's rule. If the rule raises an error, the cost is unknown and the plug-in
    is disabled.
    """
    try:
        return _PLUGINS.guarded(name, lambda: rule(call))
    except UnsupportedError:
        return unknown(call)


def plugin_rule(name: str) -> UserRule | None:
    """Return the rule that an installed plug-in registers for an operation; None without one."""
    return next((rule for rule in _plugin_rules() if rule.answers(name)), None)
