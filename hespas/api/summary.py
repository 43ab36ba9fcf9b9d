"""What a file holds, in figures: ranks, operations by class, communication by group, depth and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings, read
from hespas.api.systems import DimensionRow, dimension_rows
from hespas.converters import ReadOptions, Value, find_format
from hespas.estimators.registry import ListedEstimator
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import (
    ACCUMULATOR_BITS,
    DTYPES,
    MAC_NOISE_SIGMA,
    UNKNOWN_DTYPE,
    CollectiveKind,
    Diagnostics,
    NodeKind,
    OpClass,
    OpGraph,
    Profile,
    RegionKind,
    Resource,
    StridedGroups,
    Workload,
    timed_class_name,
)
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.groups import first_group, groups_text
from hespas.graph.passes import find_cycle, levels
from hespas.hardware import Device, System

if TYPE_CHECKING:
    import pandas

__all__ = [
    "ClassSummary",
    "CollectiveRow",
    "DevicesDocument",
    "EstimatorsDocument",
    "OpRow",
    "ProductRow",
    "ProfileSummary",
    "RegionRow",
    "Summary",
    "SummaryDocument",
    "devices_document",
    "estimators_document",
    "product_rows",
    "summarise",
    "summary_document",
    "view",
]

# In which number formats a program multiplies: operands, accumulator, and what it states beside them.

_LONGEST = 32
"""Characters of a stated figure; a longer one is no number."""


@dataclass(frozen=True, slots=True)
class ProductRow:
    """Matrix products and convolutions of one number format; sums over a step (NaN: unknown).

    Types are empty where unknown. ``accumulator_bits`` and ``mac_noise_sigma`` are the program's own words,
    empty where it states none. ``products`` counts primitive products per multiply.
    """

    lhs: str
    rhs: str
    accumulator: str
    products: int
    accumulator_bits: str
    mac_noise_sigma: str
    nodes: Count
    executions: Figure
    flops: Figure


def product_rows(graph: OpGraph) -> tuple[ProductRow, ...]:
    """One row per number format, the most FLOPs first. O(products)."""
    table = graph.contractions
    if not len(table):
        return ()
    texts: dict[str, int] = {"": 0}
    stated = [_stated(graph, key, texts)[table.node] for key in (ACCUMULATOR_BITS, MAC_NOISE_SIGMA)]
    types = (table.lhs, table.rhs, table.accumulator)
    key = np.stack([*(column.astype(np.int64) for column in types), table.products.astype(np.int64), *stated])
    keys, place = np.unique(key, axis=1, return_inverse=True)
    rows = _product_rows(graph, keys, place.reshape(-1).astype(np.int64), tuple(texts))
    return tuple(sorted(rows, key=lambda row: -np.nan_to_num(row.flops)))


def _product_rows(
    graph: OpGraph, keys: IntArray, place: IntArray, texts: tuple[str, ...]
) -> Iterator[ProductRow]:
    table = graph.contractions
    runs = graph.multiplicity[table.node]
    count = keys.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # sums past what a float holds are infinite
        executions = np.bincount(place, runs, count)
        flops = np.bincount(place, table.flops * runs, count)
    nodes = np.bincount(place, minlength=count)
    distinct: list[list[int]] = keys.T.tolist()
    for row, (lhs, rhs, accumulator, products, bits, sigma) in enumerate(distinct):
        yield ProductRow(
            lhs=_name(lhs),
            rhs=_name(rhs),
            accumulator=_name(accumulator),
            products=products,
            accumulator_bits=texts[bits],
            mac_noise_sigma=texts[sigma],
            nodes=int(nodes[row]),
            executions=float(executions[row]),
            flops=float(flops[row]),
        )


def _name(code: int) -> str:
    return "" if code == UNKNOWN_DTYPE else DTYPES[code].name


def _stated(graph: OpGraph, key: str, texts: dict[str, int]) -> IntArray:
    """For each node the number of the text it states for ``key``; new texts are added to ``texts``."""
    found = np.zeros(len(graph), np.int64)
    extra = graph.extra
    wanted = [row for row in np.unique(extra.key).tolist() if graph.strings[row] == key]
    for row in np.flatnonzero(np.isin(extra.key, wanted) & (extra.node >= 0)).tolist():
        text = bytes(extra.value(row)).decode("utf-8", "replace")
        if len(text) <= _LONGEST and text.isprintable():
            found[int(extra.node[row])] = texts.setdefault(text, len(texts))
    return found


@dataclass(frozen=True, slots=True)
class OpRow:
    """Operations of one name or class; sums over all their executions in a step (NaN: unknown).

    ``nodes`` counts them as written, ``executions`` as run; ``unknown`` counts nodes without a cost.
    """

    name: str
    nodes: Count
    executions: Figure
    flops: Figure
    bytes_moved: Figure
    duration_ns: Figure
    unknown: Count


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind over one way to group the ranks; ``comm_bytes`` per rank and step.

    ``group_size`` is -1 where groups differ; ``first_group`` lists at most its first eight ranks.
    """

    kind: str
    groups: str
    num_groups: int
    group_size: int
    first_group: tuple[int, ...]
    nodes: Count
    executions: Figure
    comm_bytes: Figure


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A loop, branch, call or fusion; ``depth`` counts those around it."""

    label: str
    kind: str
    depth: int
    trips: Figure
    nodes: Count


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One rank class. ``depth`` is the longest chain of dependencies, ``width`` the most nodes that stand
    equally deep; both are -1 where there is a cycle.
    """

    name: str
    num_ranks: Count
    first_rank: int
    last_rank: int
    nodes: Count
    data_edges: Count
    control_edges: Count
    depth: int
    width: int
    streams: Count
    by_class: tuple[OpRow, ...]
    by_op: tuple[OpRow, ...]
    products: tuple[ProductRow, ...]
    collectives: tuple[CollectiveRow, ...]
    messages: tuple[OpRow, ...]
    regions: tuple[RegionRow, ...]
    attributes: Count
    attachments: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """A measured trace: device time by category and by operation. ``negative_events`` end before they start
    and count as no time.
    """

    device: str
    events: Count
    streams: Count
    ranks: Count
    span_ns: Figure
    duration_ns: Figure
    linked_share: Figure
    host_ops: Count
    negative_events: Count
    by_category: tuple[OpRow, ...]
    by_op: tuple[OpRow, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Result):
    """What a file holds. Exactly one of ``classes`` and ``profile`` says something."""

    name: str
    format: str
    metadata: Mapping[str, str]
    num_ranks: Count
    classes: tuple[ClassSummary, ...]
    profile: ProfileSummary | None
    source: str = ""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def headline(self) -> str:
        """What it is, and how much of it."""
        name = f"{self.source or self.name} ({self.format})"
        if self.profile is not None:
            return f"{name}, {self.profile.events:,} events on {self.profile.device or 'an unnamed device'}"
        nodes = sum(each.nodes for each in self.classes)
        return f"{name}, {self.num_ranks:,} ranks in {len(self.classes):,} classes, {nodes:,} operations"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.view/1``."""
        return document_bytes(summary_document(self))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per operation (of a profile: of what ran), by name and rank class, the longest first."""
        import pandas as pd

        if self.profile is not None:
            return pd.DataFrame([asdict(row) for row in self.profile.by_op])
        rows = [
            {"rank_class": number, **asdict(row)}
            for number, each in enumerate(self.classes)
            for row in each.by_op
        ]
        return pd.DataFrame(rows)


@checked()
def view(
    source: str | Path | Value,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
) -> Summary:
    """What a file, a folder of rank files or a value holds: ranks, operations, communication, loops.

    A path is read as ``format`` (else the one sniffed) with ``options``. Raises what ``read`` does.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    if isinstance(source, Workload | Profile):
        name, value, form = source.name, source, source.metadata.get("format", "")
    else:
        form = find_format(Path(source), format).name
        name, value = str(source), read(source, format=form, options=options, diagnostics=found)
    return replace(summarise(value, form), source=name, diagnostics=found)


def summarise(value: Value, format_name: str) -> Summary:
    """Figures of a workload or a profile. O(nodes + edges), vectorised."""
    if isinstance(value, Profile):
        return Summary(value.name, format_name, dict(value.metadata), 0, (), _profile(value))
    with np.errstate(over="ignore", invalid="ignore"):  # sums past what a float holds are infinite
        classes = tuple(_rank_class(value, index) for index in range(len(value.classes)))
    return Summary(value.name, format_name, dict(value.metadata), value.num_ranks, classes, None)


def _rank_class(value: Workload, index: int) -> ClassSummary:
    graph, ranks = value.classes[index], value.ranks_of(index)
    depth, width = _depth_and_width(graph)
    classes = graph.op_class.astype(np.int64)
    untimed = (graph.op_class == int(OpClass.FREE)) & ~(graph.duration_ns > 0)
    everything = np.ones(len(graph), np.bool_)
    messages = np.isin(graph.kind, (int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE)))
    return ClassSummary(
        name=graph.name,
        num_ranks=len(ranks),
        first_rank=int(ranks[0]) if len(ranks) else -1,
        last_rank=int(ranks[-1]) if len(ranks) else -1,
        nodes=len(graph),
        data_edges=len(graph.data_deps.values),
        control_edges=len(graph.control_deps.values),
        depth=depth,
        width=width,
        streams=len(np.unique(graph.stream[(graph.stream >= 0) & (graph.resource == int(Resource.DEVICE))])),
        by_class=_rows(graph, np.where(untimed, _UNTIMED, classes), _class_name, everything),
        by_op=_rows(graph, graph.op_row.astype(np.int64), lambda row: graph.strings[row], everything),
        products=product_rows(graph),
        collectives=tuple(_collectives(graph, value.num_ranks)),
        messages=_rows(
            graph, graph.kind.astype(np.int64), lambda code: NodeKind(code).name.lower(), messages
        ),
        regions=tuple(_regions(graph)),
        attributes=len(graph.extra),
        attachments={name: len(content) for name, content in graph.attachments.items()},
    )


_UNTIMED = -1
"""Operations that cost nothing and took no time."""


def _class_name(code: int) -> str:
    return OpClass.FREE.name.lower() if code == _UNTIMED else timed_class_name(code)


def _depth_and_width(graph: OpGraph) -> tuple[int, int]:
    if not len(graph):
        return 0, 0
    if find_cycle(graph):
        return -1, -1
    level = levels(graph, [1] * len(graph))
    return max(level) + 1, int(np.bincount(level).max())


def _rows(
    graph: OpGraph, key: IntArray, name: Callable[[int], str], chosen: NDArray[np.bool_]
) -> tuple[OpRow, ...]:
    """Sums by key, the longest first, then the most FLOPs, then the most nodes."""
    if not chosen.any():
        return ()
    codes, place = np.unique(key[chosen], return_inverse=True)
    runs = graph.multiplicity[chosen]
    moved = graph.bytes_moved[chosen] * runs
    flops, duration_ns = graph.flops[chosen] * runs, graph.duration_ns[chosen] * runs
    unknown = np.isnan(flops) | np.isnan(moved)
    count = len(codes)
    nodes = np.bincount(place, minlength=count)
    executions, total_flops, total_moved, total_ns = (
        _known_sums(place, column, count) for column in (runs, flops, moved, duration_ns)
    )
    missing = np.bincount(place, weights=unknown, minlength=count)
    rows = [
        OpRow(
            name=name(int(codes[row])),
            nodes=int(nodes[row]),
            executions=float(executions[row]),
            flops=float(total_flops[row]),
            bytes_moved=float(total_moved[row]),
            duration_ns=float(total_ns[row]),
            unknown=int(missing[row]),
        )
        for row in range(count)
    ]
    return tuple(sorted(rows, key=_weight))


def _weight(row: OpRow) -> tuple[float, float, int, str]:
    return -np.nan_to_num(row.duration_ns), -np.nan_to_num(row.flops), -row.nodes, row.name


def _known_sums(place: IntArray, column: FloatArray, count: int) -> FloatArray:
    """Sums of what is known; NaN where nothing is."""
    known = ~np.isnan(column)
    sums = np.bincount(place[known], weights=column[known], minlength=count)
    return np.where(np.bincount(place[known], minlength=count) > 0, sums, np.nan)


def _collectives(graph: OpGraph, num_ranks: int) -> Iterator[CollectiveRow]:
    table = graph.collectives
    runs = graph.multiplicity[table.node]
    pairs = np.stack([table.kind.astype(np.int64), table.group_set.astype(np.int64)])
    keys, place = np.unique(pairs, axis=1, return_inverse=True)
    distinct: list[list[int]] = keys.T.tolist()
    for row, (kind, which) in enumerate(distinct):
        mine = place.reshape(-1) == row
        groups = graph.group_sets[which] if which >= 0 else StridedGroups.all_ranks(num_ranks)
        yield CollectiveRow(
            kind=CollectiveKind(kind).name.lower(),
            groups=groups_text(groups, num_ranks),
            num_groups=groups.num_groups,
            group_size=groups.group_size,
            first_group=first_group(groups),
            nodes=int(mine.sum()),
            executions=float(runs[mine].sum()),
            comm_bytes=float((table.comm_bytes[mine] * runs[mine]).sum()),
        )


def _regions(graph: OpGraph) -> Iterator[RegionRow]:
    """All regions, each behind the one around it."""
    regions = graph.regions
    parents: list[int] = regions.parent.tolist()
    inside = np.bincount(graph.region[graph.region >= 0], minlength=len(parents))
    depth: list[int] = []
    for parent in parents:  # a parent is always a smaller row
        depth.append(0 if parent < 0 else depth[parent] + 1)
    children: dict[int, list[int]] = {}
    for region, parent in enumerate(parents):
        children.setdefault(parent, []).append(region)
    stack = list(reversed(children.get(-1, [])))
    while stack:
        region = stack.pop()
        kind = RegionKind(int(regions.kind[region])).name.lower().replace("_", " ")
        label = graph.strings[int(regions.label[region])]
        yield RegionRow(label, kind, depth[region], float(regions.trips[region]), int(inside[region]))
        stack += reversed(children.get(region, []))


def _profile(profile: Profile) -> ProfileSummary:
    ran_ns = np.maximum(profile.duration_ns, 0.0)
    total = float(ran_ns.sum())
    linked = float(ran_ns[profile.host_event >= 0].sum())
    end_ns = profile.start_ns + ran_ns
    span = float(end_ns.max() - profile.start_ns.min()) if len(profile) else 0.0
    strings = profile.strings
    key = np.where(profile.op_row > 0, profile.op_row, profile.kernel_row)
    return ProfileSummary(
        device=profile.device,
        events=len(profile),
        streams=len(np.unique(profile.stream)),
        ranks=len(np.unique(profile.rank)),
        span_ns=span,
        duration_ns=total,
        linked_share=linked / total if total else 0.0,
        host_ops=len(profile.host),
        negative_events=int((profile.duration_ns < 0).sum()),
        by_category=_event_rows(profile, profile.category_row, lambda row: strings[row]),
        by_op=_event_rows(profile, key, lambda row: strings[row]),
    )


def _event_rows(profile: Profile, key: NDArray[np.int32], name: Callable[[int], str]) -> tuple[OpRow, ...]:
    codes, place = np.unique(key, return_inverse=True)
    nodes = np.bincount(place, minlength=len(codes))
    sums = np.bincount(place, weights=np.maximum(profile.duration_ns, 0.0), minlength=len(codes))
    unknown = float("nan")
    rows = [
        OpRow(
            name(int(codes[row])), int(nodes[row]), float(nodes[row]), unknown, unknown, float(sums[row]), 0
        )
        for row in range(len(codes))
    ]
    return tuple(sorted(rows, key=_weight))


class SummaryDocument(Document, frozen=True, kw_only=True):
    """What hespas view --json writes."""

    schema: Literal["hespas.view/1"] = "hespas.view/1"
    name: str
    format: str
    metadata: Mapping[str, str]
    num_ranks: Count
    classes: tuple[ClassSummary, ...]
    profile: ProfileSummary | None


def summary_document(summary: Summary) -> msgspec.Struct:
    """The figures as ``hespas.view/1``."""
    return SummaryDocument(
        inputs=[summary.source],
        diagnostics=findings(summary.diagnostics),
        name=summary.name,
        format=summary.format,
        metadata=summary.metadata,
        num_ranks=summary.num_ranks,
        classes=summary.classes,
        profile=summary.profile,
    )


class EstimatorsDocument(Document, frozen=True, kw_only=True):
    """What hespas estimators --json writes."""

    schema: Literal["hespas.estimators/1"] = "hespas.estimators/1"
    estimators: list[ListedEstimator]


def estimators_document(rows: Sequence[ListedEstimator]) -> msgspec.Struct:
    """The list of estimators: ``hespas.estimators/1``."""
    return EstimatorsDocument(inputs=[], diagnostics=[], estimators=list(rows))


class _Peak(msgspec.Struct, frozen=True):
    unit: str
    dtype: str
    density: str
    flops_per_s: Figure


class _Memory(msgspec.Struct, frozen=True):
    level: str
    name: str
    capacity_bytes: int
    bandwidth_bytes_per_s: Figure


class _Link(msgspec.Struct, frozen=True):
    name: str
    kind: str
    bandwidth_bytes_per_s: Figure
    latency_ns: Figure
    links_per_device: int
    devices_per_domain: int


class _DeviceRow(msgspec.Struct, frozen=True):
    name: str
    vendor: str
    family: str
    kind: str
    description: str
    aliases: tuple[str, ...]
    tdp_w: Figure
    peaks: tuple[_Peak, ...]
    memories: tuple[_Memory, ...]
    links: tuple[_Link, ...]


class _SystemRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str
    device: str
    aliases: tuple[str, ...]
    max_devices: int
    dimensions: list[DimensionRow]


class DevicesDocument(Document, frozen=True, kw_only=True):
    """What hespas hardware list --json writes."""

    schema: Literal["hespas.devices/1"] = "hespas.devices/1"
    devices: list[_DeviceRow]
    systems: list[_SystemRow]


def devices_document(devices: Sequence[Device], systems: Sequence[System] = ()) -> msgspec.Struct:
    """Devices and systems of them (-1: no bound): ``hespas.devices/1``. A peak is per device, dense or sparse
    as it says; ``hespas hardware show`` tells the sources.
    """
    return DevicesDocument(
        inputs=[],
        diagnostics=[],
        devices=msgspec.convert(list(devices), list[_DeviceRow], from_attributes=True),
        systems=[
            _SystemRow(
                name=each.name,
                description=each.description,
                device=each.device,
                aliases=each.aliases,
                max_devices=each.most,
                dimensions=dimension_rows(each),
            )
            for each in systems
        ],
    )
