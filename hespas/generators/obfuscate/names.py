"""Replacement of all texts of a workload or profile by tokens, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from hespas.costs.aten import ATEN, COMPOSITE, VIEWS
from hespas.costs.table import HLO_ALIASES, TABLE
from hespas.generators.obfuscate.keys import Key
from hespas.graph import (
    ACCUMULATOR_BITS,
    DONATED_TO,
    ESTIMATED_ON,
    GUESSED_VALUES,
    IN_PLACE,
    MAC_NOISE_SIGMA,
    PROGRAM_BYTES,
    RECORDED_STEPS,
    RETURNED,
    SOURCE_DTYPE,
    STEP_FACTS,
    WHOLE_JOB,
    Diagnostics,
    ExtraTable,
    OpGraph,
    Profile,
    StringTable,
    Workload,
)
from hespas.graph.columns import ColumnTable, IntArray
from hespas.graph.passes import is_runtime_copy
from hespas.operations.model import canonical_op

__all__ = ["hide_names", "hide_profile_names", "reveal_names"]

_METADATA = frozenset(
    {
        "format",
        "version",
        "device",
        "is_scheduled",
        "num_partitions",
        "num_replicas",
        ESTIMATED_ON,
        GUESSED_VALUES,
        PROGRAM_BYTES,
        STEP_FACTS,
        WHOLE_JOB,
    }
)
"""Metadata that decides how a workload is simulated; all other metadata is dropped."""

_KEYS = frozenset(
    {ACCUMULATOR_BITS, DONATED_TO, IN_PLACE, MAC_NOISE_SIGMA, RETURNED, SOURCE_DTYPE, "involved_dim"}
)
"""Attributes of nodes that estimators and simulators read; all other attributes are dropped."""

_VALUES = frozenset(b"0123456789.,-+ abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_<>")
_LONGEST_VALUE = 64
_FILE_TAGS = frozenset({201, 202})
"""Rows of a Chakra file without a key that are kept: its version, and the marker of a file as stated."""
_NODE_TAGS = frozenset({107})
"""Rows of a Chakra node without a key that are kept: microseconds that a simulator reads."""

_FUSED_KERNELS = """
    allgather_base allreduce alltoall_base causal_conv1d cross_entropy flash_mla_with_kvcache
    fused_add_layer_norm fused_add_rms_norm fused_moe fused_rms_norm_backward gelu_and_mul moe_permute
    moe_unpermute quantize recv reduce_scatter_base rotary_embedding selective_state_update send silu_and_mul
    squared_relu
"""
"""Operations of public libraries that have no cost rule but that estimators know by name."""
_REDUCTIONS = frozenset(
    ["add", "and", "max", "maximum", "mean", "min", "minimum", "mul", "multiply", "or", "sum"]
)
_LAYOUT = frozenset("0123456789,{}:()*-TSELD ")
"""Characters of layouts and tilings; the encoding of a type with others is dropped."""

_PROFILE_METADATA = frozenset({"format", "device"})
_PLAIN_TEXTS = frozenset({"category_id", "shapes_id", "dtype_id", "grid_id", "kind_id", "ranks_id"})
"""Texts of a profile that hold no names: classes of events, shapes, types, launch sizes, collectives."""
_DROPPED_TEXTS = frozenset({"strides_id", "values_id"})

_Table = TypeVar("_Table", bound=ColumnTable)


def hide_names(workload: Workload, key: Key, diagnostics: Diagnostics) -> Workload:
    """Return a workload in which every name, path and label is a token of ``key``.

    Documents, attributes and metadata that no estimator or simulator reads are dropped and reported. Node
    numbers follow the order of the original ones, which simulators use, so that a simulation takes the same
    time. O(nodes + texts).
    """
    metadata = {name: text for name, text in workload.metadata.items() if name in _METADATA}
    _report(diagnostics, workload.name, "facts about the job", len(workload.metadata) - len(metadata))
    return replace(
        workload,
        name="workload",
        classes=tuple(_hidden(graph, key, diagnostics) for graph in workload.classes),
        metadata=metadata,
    )


def _report(diagnostics: Diagnostics, where: str, what: str, count: int) -> None:
    if count:
        diagnostics.info("obfuscate.dropped", where, f"{what} dropped", count=count)


def _hidden(graph: OpGraph, key: Key, diagnostics: Diagnostics) -> OpGraph:
    texts = _Texts(graph.strings)
    columns = {
        # copies by the runtime, which run without a launch, keep their kind
        "name_id": texts.column(
            graph.name_id, lambda text: "Memcpy" if is_runtime_copy(text) else key.token(text)
        ),
        "op_id": texts.column(graph.op_id, lambda text: _operation(text, key)),
        "source_id": texts.column(graph.source_id, key.token),
        "framework_id": texts.column(graph.framework_id, key.token),
    }
    reduction = texts.column(graph.collectives.reduction, lambda text: text if text in _REDUCTIONS else "")
    collectives = replace(graph.collectives, reduction=reduction)
    encoding = texts.column(graph.types.encoding, lambda text: text if set(text) <= _LAYOUT else "")
    types = replace(graph.types, encoding=encoding)
    regions = replace(graph.regions, label=texts.column(graph.regions.label, key.token))
    extra = _kept_attributes(graph, texts)
    _report(diagnostics, graph.name, "attributes of the source format", len(graph.extra) - len(extra))
    attachments = {name: data for name, data in graph.attachments.items() if name == RECORDED_STEPS}
    _report(
        diagnostics, graph.name, "attached documents of the source", len(graph.attachments) - len(attachments)
    )
    number = np.empty(len(graph), np.uint64)
    number[np.argsort(graph.id, kind="stable")] = np.arange(len(graph), dtype=np.uint64)
    return replace(
        graph,
        name="graph",
        id=number,
        collectives=collectives,
        types=types,
        regions=regions,
        extra=extra,
        attachments=attachments,
        strings=texts.table(),
        **columns,
    )


class _Texts:
    """Table of the texts that remain, built from columns of the original table."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._rows: dict[str, int] = {"": 0}

    def row(self, text: str) -> int:
        """Return the row of a text, which is added if new."""
        return self._rows.setdefault(text, len(self._rows))

    def column(self, rows: Any, change: Callable[[str], str]) -> Any:
        """Return the rows of the changed texts; ``change`` is called once per distinct row."""
        if not len(rows):
            return rows
        distinct, position = np.unique(rows, return_inverse=True)
        new = [self.row(change(self._strings[row])) if row > 0 else row for row in distinct.tolist()]
        return np.array(new, rows.dtype)[position.reshape(-1)]

    def table(self) -> StringTable:
        """Return the finished table."""
        return StringTable.from_strings(self._rows)


@cache
def _public_operations() -> frozenset[str]:
    """Return the operators of public frameworks, by which estimators and simulators time and place work."""
    tables = (ATEN, COMPOSITE, VIEWS, TABLE, HLO_ALIASES, _FUSED_KERNELS.split())
    return frozenset(canonical_op(name) for table in tables for name in table)


def _operation(text: str, key: Key) -> str:
    """Return the canonical name of a public operator, or the token of any other operation."""
    name = canonical_op(text)
    return name if name in _public_operations() else key.token(text)


def _kept_attributes(graph: OpGraph, texts: _Texts) -> ExtraTable:
    table, rows = graph.extra, list[tuple[int, int, int, bytes]]()
    names = {row: graph.strings[row] for row in np.unique(table.key).tolist()}
    tags: list[int] = table.tag.tolist()
    keys: list[int] = table.key.tolist()
    wanted = [
        row
        for row, (tag, key, node) in enumerate(zip(tags, keys, table.node.tolist(), strict=True))
        if names[key] in _KEYS or (not names[key] and tag in (_FILE_TAGS if node < 0 else _NODE_TAGS))
    ]
    for row in wanted:
        name, value = names[keys[row]], table.value(row)
        if name and name != "involved_dim" and (len(value) > _LONGEST_VALUE or not set(value) <= _VALUES):
            continue
        rows.append((int(table.node[row]), texts.row(name), tags[row], value))
    return ExtraTable.from_rows(rows)


def hide_profile_names(profile: Profile, key: Key, diagnostics: Diagnostics) -> Profile:
    """Return a profile in which operations, kernels, modules, threads and groups are tokens of ``key``.

    Its times start at 0. Attached documents, values of arguments and metadata are dropped and reported.
    O(events + texts).
    """
    texts = _Texts(profile.strings)

    def hidden(name: str, column: Any) -> Any:
        if name in _DROPPED_TEXTS:
            return np.zeros_like(column)
        return texts.column(column, str if name in _PLAIN_TEXTS else key.token)

    def table(value: _Table) -> _Table:
        changes = {name: hidden(name, getattr(value, name)) for name in value.DTYPES if name.endswith("_id")}
        return replace(value, **changes) if changes else value  # type: ignore[type-var]

    columns: dict[str, Any] = {}
    for entry in fields(profile):
        value = getattr(profile, entry.name)
        if isinstance(value, ColumnTable):
            columns[entry.name] = table(value)
        elif entry.name.endswith("_id"):
            columns[entry.name] = hidden(entry.name, value)
    metadata = {name: text for name, text in profile.metadata.items() if name in _PROFILE_METADATA}
    _report(diagnostics, profile.name, "facts about the recording", len(profile.metadata) - len(metadata))
    _report(diagnostics, profile.name, "attached documents of the recording", len(profile.attachments))
    starts: tuple[IntArray | Any, ...] = (
        profile.start_ns,
        profile.host.start_ns,
        profile.ranges.start_ns,
        profile.waits.start_ns,
        profile.steps.start_ns,
        profile.memory.time_ns,
    )
    finite = np.concatenate([times[np.isfinite(times)] for times in starts])
    hidden_profile = replace(
        profile, name="profile", strings=texts.table(), metadata=metadata, attachments={}, **columns
    )
    return hidden_profile.shifted(-float(finite.min())) if len(finite) else hidden_profile


def reveal_names(value: Workload | Profile, key: Key) -> tuple[Workload | Profile, int, int]:
    """Return a workload or profile in which tokens of ``key`` are the original texts. Also return the number
    of distinct tokens that were replaced, and of texts that look like tokens of another key.
    """
    revealed_tokens, foreign = set[str](), set[str]()

    def revealed(strings: StringTable) -> StringTable:
        texts = list[str]()
        for text in strings:
            plain = key.text(text)
            if plain is not None:
                revealed_tokens.add(text)
            elif key.is_token(text):
                foreign.add(text)
            texts.append(text if plain is None else plain)
        return StringTable.from_strings(texts)

    if isinstance(value, Profile):
        changed: Workload | Profile = replace(value, strings=revealed(value.strings))
    else:
        classes = tuple(replace(graph, strings=revealed(graph.strings)) for graph in value.classes)
        changed = replace(value, classes=classes)
    return changed, len(revealed_tokens), len(foreign)
