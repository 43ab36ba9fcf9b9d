"""Tables of the distinct operation signatures and source locations of a program; nodes refer to their rows.

JAX nests locations: ``loc("jit(step)/mlp/dot_general"("model.py":12:8))``. The outermost name is the
framework's name of the operation, the first file position is the source. Equal locations are decoded once.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hespas.converters.stablehlo.mlir import MlirLocation
from hespas.converters.stablehlo.types import Memo, TypeInfo
from hespas.costs.operation import Attributes, Cost, CustomAttributes, unknown_cost
from hespas.costs.operation import Operation as CostInput
from hespas.costs.table import canonical_name, cost_of, find_rule
from hespas.graph import DYNAMIC, OpClass
from hespas.graph.columns import StringTableBuilder

__all__ = ["LocationTable", "SignatureTable", "StablehloSignature", "has_rule", "price", "table_name"]


def table_name(op_name: str) -> str:
    """Return the name of an operation in the cost table, ``""`` for a name without a dialect.

    An operation without a dialect is not a StableHLO operation, even if the table has its name.
    """
    return canonical_name(op_name) if "." in op_name else ""


def has_rule(op_name: str) -> bool:
    """Return True if the cost table has a rule for the operation."""
    return "." in op_name and find_rule(op_name) is not None


def price(op_name: str, described: CostInput) -> Cost:
    """Return the cost of one operation. The class is UNKNOWN if the cost table does not have the
    operation.
    """
    return cost_of(op_name, described) if "." in op_name else unknown_cost(described)


class StablehloSignature(NamedTuple):
    """Properties that many nodes have in common: full operation name, type table rows of operands and
    results, and cost of one execution.

    ``is_bounded`` is True if extents are upper bounds, ``is_dynamic`` if some are unknown, ``has_rule`` if
    the cost table has the operation, and ``needs_report`` if costs are unknown or bounds. ``label`` is the
    name for nodes: the operation without its dialect, or the target of a custom call. ``config`` is the
    configuration of a custom call on quantised tensors, which may state scales.
    """

    op_name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    cost: Cost
    is_bounded: bool
    is_dynamic: bool
    has_rule: bool
    needs_report: bool
    label: str
    config: str = ""


_SignatureKey = tuple[str, tuple[TypeInfo, ...], tuple[TypeInfo, ...], tuple[int, ...], Attributes]
"""Operation name, types of operands and of results, positions of repeated operands, attributes."""


_MAX_CONFIG = 1 << 16
"""Largest configuration of a custom call that a node keeps [characters]."""


class SignatureTable:
    """Table of the distinct signatures (operation, types, attributes) of one program. ``known[key]`` is the
    index in ``rows`` of the signature of an operation. It is added to ``rows`` when it is first needed.
    """

    def __init__(self) -> None:
        self.rows: list[StablehloSignature] = []
        self.known = Memo(self._add)
        self._unknown: dict[tuple[str, tuple[TypeInfo, ...], tuple[TypeInfo, ...]], int] = {}

    def plain(self, name: str, operands: tuple[TypeInfo, ...], results: tuple[TypeInfo, ...]) -> int:
        """Return the row of an operation whose cost depends only on its name and types."""
        return self.known[name, operands, results, (), None]

    def unknown(self, name: str, operands: tuple[TypeInfo, ...], results: tuple[TypeInfo, ...]) -> int:
        """Return the row of an operation that counts as one of unknown FLOPs, even if the cost table has its
        name.
        """
        described = CostInput(
            tuple(tensor for info in operands for tensor in info.tensors),
            tuple(tensor for info in results for tensor in info.tensors),
            None,
        )
        op_class = OpClass.CUSTOM if canonical_name(name) == "custom_call" else OpClass.UNKNOWN
        key = (name, operands, results)
        if key not in self._unknown:
            self._unknown[key] = self.priced(name, operands, results, unknown_cost(described, op_class))
        return self._unknown[key]

    def _add(self, key: _SignatureKey) -> int:
        name, operands, results, repeated, attributes = key
        described = CostInput(
            tuple(tensor for info in operands for tensor in info.tensors),
            tuple(tensor for info in results for tensor in info.tensors),
            attributes,
            repeated,
        )
        label = config = ""
        if isinstance(attributes, CustomAttributes):
            label = attributes.target
            tensors = (*described.operands, *described.results)
            if any(tensor.expressed is not None for tensor in tensors):
                config = attributes.config if len(attributes.config) <= _MAX_CONFIG else ""
        return self.priced(name, operands, results, price(name, described), label=label, config=config)

    def priced(
        self,
        name: str,
        operands: tuple[TypeInfo, ...],
        results: tuple[TypeInfo, ...],
        cost: Cost,
        *,
        label: str = "",
        config: str = "",
    ) -> int:
        """Add a row for an operation whose cost is given, and return its number."""
        infos = (*operands, *results)
        is_bounded = any(info.is_bounded for info in infos)
        self.rows.append(
            StablehloSignature(
                name,
                tuple(row for info in operands for row in info.rows),
                tuple(row for info in results for row in info.rows),
                cost,
                is_bounded,
                any(DYNAMIC in tensor.shape for info in infos for tensor in info.tensors),
                has_rule(name),
                is_bounded or not cost.is_known,
                label or name.rpartition(".")[2],
                config,
            )
        )
        return len(self.rows) - 1


_NAME = r'loc\((?:callsite\()?(?:fused(?:<[^>]*>)?\[)?"((?:[^"\\]|\\.)*)"(?!:\d)'

_FILE = r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)'

_UNKNOWN_FILE = "-"


class LocationTable:
    """Table of distinct locations. ``rows[i]`` is (string row of the source position, string row of the
    framework's name); row 0 is empty.

    ``path`` is the input file (``""``: an input without lines). The lines of this file serve as locations if
    the program states no others.
    """

    def __init__(self, strings: StringTableBuilder, path: str, *, enabled: bool) -> None:
        self.rows: list[tuple[int, int]] = [(0, 0)]
        self._strings = strings
        self._path = path
        self.enabled = enabled
        self._rows_by_location: dict[MlirLocation, int] = {}
        self._names = [""]
        self._within: dict[tuple[int, int], int] = {}

    def row(self, location: MlirLocation) -> int:
        """Return the row of a location, 0 for an empty one. Call this only if locations are ``enabled``."""
        row = self._rows_by_location.get(location)
        if row is None:
            source, name = self.describe(location)
            row = self._rows_by_location[location] = self._add(self._strings.add(source), name)
        return row

    def _add(self, source_id: int, name: str) -> int:
        pair = (source_id, self._strings.add(name))
        if pair == (0, 0):
            return 0
        self.rows.append(pair)
        self._names.append(name)
        return len(self.rows) - 1

    def place(self, row: int) -> str:
        """Return the text of a location for an error; ``""`` for an empty one."""
        strings = self._strings.build()
        source, name = (strings[part] for part in self.rows[row])
        line = source.removeprefix(f"{self._path}:")
        return " ".join(filter(None, (f"line {line}" if line != source else source, name)))

    def within(self, call: int, rows: list[int]) -> list[int]:
        """Return the rows of a called function's locations, prefixed by the name of the call at row ``call``.

        Frameworks name the operations of a function relative to it (``select_n``). XLA prepends the name of
        the call when it inlines a function, so that profiles have ``jit(step)/jit(_where)/select_n``.
        """
        if not call or not self._names[call]:
            return rows
        for row in rows:
            if (call, row) not in self._within:
                outer, inner = self._names[call], self._names[row]
                source = self.rows[row][0] or self.rows[call][0]
                if not inner:
                    inner = outer
                elif inner.partition("/")[0] != outer.partition("/")[0]:
                    inner = f"{outer}/{inner}"
                self._within[call, row] = self._add(source, inner)
        return [self._within[call, row] for row in rows]

    def describe(self, location: MlirLocation) -> tuple[str, str]:
        """Return source position and framework name of a location, each ``""`` if absent."""
        text = str(location)
        name, file = re.match(_NAME, text), re.search(_FILE, text)
        source = ""
        name_of_file = file[1] if file is not None else ""
        if name_of_file == _UNKNOWN_FILE:
            name_of_file = self._path
        if file is not None and name_of_file:
            source = f"{name_of_file}:{file[2]}:{file[3]}"
        return source, name[1] if name else ""
