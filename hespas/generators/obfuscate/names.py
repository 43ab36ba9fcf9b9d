"""Replacement of all texts of a workload or profile by tokens, and the way back.

Texts stay readable if they identify nothing: numbers, element types, and words of schemas. A file may hold
any text in any of its fields, so each text that stays is checked word by word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
    CollectiveKind,
    Diagnostics,
    ExtraTable,
    OpGraph,
    Profile,
    StringTable,
    Workload,
    find_dtype,
    step_facts,
)
from hespas.graph.columns import ColumnTable, IntArray
from hespas.graph.passes import is_runtime_copy
from hespas.graph.quantised import QuantisedType, parse_quantised
from hespas.operations.model import canonical_op

__all__ = ["hide_names", "hide_profile_names", "public_profile_text", "reveal_names"]

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[xe]\d*)*")
_DEVICE = re.compile(r"[\w .,:+()-]{1,64}")
_VERSION = re.compile(r"\d+(?:\.\d+){0,3}")
_FRAMEWORKS = frozenset({"jax", "maxtext", "megatron", "torch", "torch.compile", "torchtitan"})
_NAME = re.compile(r"[a-z0-9_-]{1,16}")
_DIGITS = frozenset("0123456789 ;")
_FLAG = re.compile(r"true|false", re.IGNORECASE)
_PYTORCH_TYPES = """
    BFloat16 Bool Byte Char ComplexDouble ComplexFloat Device Double Float GenericList Half Int Long None
    Scalar ScalarList Short Tensor TensorList bool c10 char double float int long short signed unsigned
"""
_TYPE_WORDS = frozenset(_PYTORCH_TYPES.split())
"""Words of element types as PyTorch writes them."""
_ATTRIBUTE_WORDS = frozenset(["convert", "true"])
_STEP_WORDS = frozenset(
    ["busy_ns", "false", "inside", "is_annotated", "null", "period_ns", "span_ns", "times_ns", "true"]
)
"""Words of the document of recorded steps."""
_VERSION_TAG, _AS_STATED_TAG, _MICROS_TAG = 201, 202, 107
"""Rows of a Chakra file without a key that are kept: its version, the marker of a file as stated, and
microseconds that a simulator reads.
"""
_EVENT_CLASSES = """
    cpu_op cuda_graph gpu_memcpy gpu_memset gpu_user_annotation kernel memcpy memset overhead thunk
    user_annotation wrapper
"""
_CATEGORIES = frozenset({*_EVENT_CLASSES.split(), "XLA Ops"})
"""Classes of events of public profilers."""
_COLLECTIVES = frozenset(kind.name.replace("_", "").lower() for kind in CollectiveKind) | {
    *("allgatherbase", "alltoallbase", "alltoallv", "collectivepermute", "recv", "reducescatterbase", "send"),
}
_COPY = re.compile(
    r"Mem(?:cpy|set)(?: [HDPA]to[HDPA])?"
    r"(?: \((?:Array|Device|Host|Managed|Pageable|Pinned|Unified|Unknown|[ >-])*\))?"
    r"|MEMORY_COPY_(?:HOST|DEVICE)_TO_(?:HOST|DEVICE)|Copy(?:Device|Host)To(?:Device|Host)"
)
_LONGEST_VALUE, _FIRST_LETTER, _MICROS_BYTES = 64, 32, 16


def _has_only(text: str, words: frozenset[str]) -> bool:
    """Return True if each word of a text is a number, an element type, or one of ``words``."""
    return all(_NUMBER.fullmatch(word) or find_dtype(word) or word in words for word in _WORD.findall(text))


def _public_device(text: str) -> str:
    """Return the name of a device, the empty text if it cannot be one, such as a path or an address."""
    return text if _DEVICE.fullmatch(text) else ""


def _public_step_facts(text: str) -> str:
    """Return the facts of a step that simulators read, without other facts and free text."""
    facts = step_facts({STEP_FACTS: text})
    if facts is None:
        return ""
    named = {name: value for name in ("dtype", "library") if _NAME.fullmatch(value := getattr(facts, name))}
    return replace(
        facts,
        **({"dtype": "", "library": ""} | named),
        device=_public_device(facts.device),
        framework=facts.framework if facts.framework in _FRAMEWORKS else "",
    ).text()


def _checked(is_public: Callable[[str], object]) -> Callable[[str], str]:
    return lambda text: text if is_public(text) else ""


_METADATA: Mapping[str, Callable[[str], str]] = {
    "format": _checked(_NAME.fullmatch),
    "version": _checked(_VERSION.fullmatch),
    "device": _public_device,
    "is_scheduled": _checked(_FLAG.fullmatch),
    "num_partitions": _checked(_DIGITS.issuperset),
    "num_replicas": _checked(_DIGITS.issuperset),
    ESTIMATED_ON: _public_device,
    GUESSED_VALUES: _checked(_DIGITS.issuperset),
    PROGRAM_BYTES: _checked(_DIGITS.issuperset),
    STEP_FACTS: _public_step_facts,
    WHOLE_JOB: _checked(_DIGITS.issuperset),
}
"""Metadata that decides how a workload is simulated -> the part of its text that is public."""


def _public_metadata(metadata: Mapping[str, str], names: frozenset[str] | None = None) -> dict[str, str]:
    """Return the public entries that decide how a workload is simulated, or of these only ``names``."""
    chosen = _METADATA if names is None else names
    public = {name: _METADATA[name](text) for name, text in metadata.items() if name in chosen}
    return {name: text for name, text in public.items() if text}


_KEYS = frozenset({ACCUMULATOR_BITS, DONATED_TO, IN_PLACE, MAC_NOISE_SIGMA, RETURNED, SOURCE_DTYPE})
"""Text attributes of nodes that estimators and simulators read."""
_INVOLVED_DIMENSIONS = "involved_dim"
"""List attribute that simulators read: one flag per dimension of the network."""


def _is_public_attribute(name: str, tag: int, value: bytes, *, of_file: bool) -> bool:
    """Return True if an attribute of a node or file is read by an estimator or simulator and identifies
    nothing.
    """
    if name == _INVOLVED_DIMENSIONS:
        return max(value[:_LONGEST_VALUE], default=0) < _FIRST_LETTER and len(value) <= _LONGEST_VALUE
    if name:
        text = value.decode("utf-8", "replace")
        return name in _KEYS and len(text) <= _LONGEST_VALUE and _has_only(text, _ATTRIBUTE_WORDS)
    if of_file:
        is_version = tag == _VERSION_TAG and _VERSION.fullmatch(value.decode("utf-8", "replace")) is not None
        return is_version or (tag == _AS_STATED_TAG and not value)
    return tag == _MICROS_TAG and len(value) == _MICROS_BYTES


_PLAIN_COLUMNS = frozenset({"category_id", "shapes_id", "dtype_id", "grid_id", "kind_id", "ranks_id"})
"""Columns of a profile whose texts are classes of events, shapes, types, launch sizes and collectives."""


def public_profile_text(column: str, text: str, key: Key) -> str:
    """Return a text of one of :data:`_PLAIN_COLUMNS` as it stays: unknown words of type lists become
    ``other``, and other texts that are not public become tokens.
    """
    if column == "dtype_id":
        return _WORD.sub(lambda word: word[0] if _has_only(word[0], _TYPE_WORDS) else "other", text)
    if column == "category_id":
        is_public = text in _CATEGORIES
    elif column == "kind_id":
        is_public = re.sub(r"[ _-]", "", text).lower() in _COLLECTIVES
    else:
        is_public = _has_only(text, frozenset("TSELD"))
    return text if is_public else key.token(text)


_FUSED_KERNELS = """
    allgather_base allreduce alltoall_base causal_conv1d cross_entropy flash_mla_with_kvcache
    fused_add_layer_norm fused_add_rms_norm fused_moe fused_rms_norm_backward gelu_and_mul moe_permute
    moe_unpermute moe_unpermute_backward quantize recv reduce_scatter_base rotary_embedding
    selective_state_update send silu_and_mul squared_relu
"""
"""Operations of public libraries that have no cost rule but that estimators know by name."""
_REDUCTIONS = frozenset(
    ["add", "and", "max", "maximum", "mean", "min", "minimum", "mul", "multiply", "or", "sum"]
)
_LAYOUT = frozenset("0123456789,{}:()*-TSELD ")
"""Characters of layouts and tilings. Encodings of types with others are dropped, except quantised types."""

_PROFILE_METADATA = frozenset({"format", "device"})
_DROPPED_TEXTS = frozenset({"strides_id", "values_id"})

_Table = TypeVar("_Table", bound=ColumnTable)


def hide_names(workload: Workload, key: Key, diagnostics: Diagnostics) -> Workload:
    """Return a workload in which every name, path and label is a token of ``key``.

    Documents, attributes and metadata that no estimator or simulator reads are dropped and reported. Node
    numbers follow the order of the original ones, which simulators use, so that a simulation takes the same
    time. O(nodes + texts).
    """
    metadata = _public_metadata(workload.metadata)
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


def _public_encoding(text: str) -> str:
    """Return the part of the encoding of a type that is independent of the values: a layout, or the storage
    of a quantised type without its scales and zero points.
    """
    quantised = parse_quantised(text)
    if quantised is None or quantised.kind == "calibrated":
        return text if set(text) <= _LAYOUT else ""
    stored = quantised.storage, quantised.expressed
    return str(QuantisedType("any", *stored, quantised.low, quantised.high))


def _hidden(graph: OpGraph, key: Key, diagnostics: Diagnostics) -> OpGraph:
    texts = _Texts(graph.strings)

    def hidden_name(text: str) -> str:
        """Return a token, except for copies and fills by the runtime, which simulators recognise by name."""
        if not is_runtime_copy(text):
            return key.token(text)
        return text if _COPY.fullmatch(text) else "Memset" if "memset" in text.lower() else "Memcpy"

    columns = {
        "name_id": texts.column(graph.name_id, hidden_name),
        "op_id": texts.column(graph.op_id, lambda text: _operation(text, key)),
        "source_id": texts.column(graph.source_id, key.token),
        "framework_id": texts.column(graph.framework_id, key.token),
    }
    reduction = texts.column(graph.collectives.reduction, lambda text: text if text in _REDUCTIONS else "")
    collectives = replace(graph.collectives, reduction=reduction)
    types = replace(graph.types, encoding=texts.column(graph.types.encoding, _public_encoding))
    hidden_types = [graph.strings[row] for row in graph.types.encoding.tolist()]
    hidden_types = [text for text in hidden_types if _public_encoding(text) != text]
    _report(
        diagnostics, graph.name, "scales and zero points, and other encodings of types", len(hidden_types)
    )
    regions = replace(graph.regions, label=texts.column(graph.regions.label, key.token))
    table, rows = graph.extra, list[tuple[int, int, int, bytes]]()
    names = {row: graph.strings[row] for row in np.unique(table.key).tolist()}
    attributes = zip(table.node.tolist(), table.key.tolist(), table.tag.tolist(), strict=True)
    for row, (node, name_id, tag) in enumerate(attributes):
        name, value = names[name_id], table.value(row)
        if _is_public_attribute(name, tag, value, of_file=node < 0):
            rows.append((node, texts.row(name), tag, value))
    extra = ExtraTable.from_rows(rows)
    _report(diagnostics, graph.name, "attributes of the source format", len(graph.extra) - len(extra))
    steps = graph.attachments.get(RECORDED_STEPS, b"")
    has_steps = bool(steps) and _has_only(steps.decode("utf-8", "replace"), _STEP_WORDS)
    attachments = {RECORDED_STEPS: steps} if has_steps else {}
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


def hide_profile_names(profile: Profile, key: Key, diagnostics: Diagnostics) -> Profile:
    """Return a profile in which operations, kernels, modules, threads and groups are tokens of ``key``.

    Its times start at 0. Attached documents, values of arguments and metadata are dropped and reported.
    O(events + texts).
    """
    texts = _Texts(profile.strings)

    def hidden(name: str, column: Any) -> Any:
        if name in _DROPPED_TEXTS:
            return np.zeros_like(column)
        if name in _PLAIN_COLUMNS:
            return texts.column(column, lambda text: public_profile_text(name, text, key))
        return texts.column(column, key.token)

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
    metadata = _public_metadata(profile.metadata, _PROFILE_METADATA)
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
        profile,
        name="profile",
        devices=tuple(map(_public_device, profile.devices)),
        strings=texts.table(),
        metadata=metadata,
        attachments={},
        **columns,
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
