"""Contents of a file: ranks, operations by class, communication by group, depth and width, events of
profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.api.arguments import ReadingProgram, checked
from hespas.api.documents import Document, Result, findings
from hespas.api.io import read
from hespas.converters import Value, find_format
from hespas.converters.format import SourceFormat
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
from hespas.graph.hints import Option
from hespas.graph.passes import find_cycle, levels
from hespas.report import Table, table_from_records
from hespas.report.texts import counted

__all__ = [
    "ClassSummary",
    "CollectiveSummary",
    "OpRow",
    "ProductRow",
    "ProfileSummary",
    "RegionRow",
    "Summary",
    "SummaryDocument",
    "product_rows",
    "summarise",
    "summary_document",
    "view",
]

_MAX_TEXT = 32
"""Characters of a stated figure; longer texts are not numbers."""
_UNTIMED = -1
"""Code of zero-cost operations that took no time."""


@dataclass(frozen=True, slots=True)
class ProductRow:
    """Matmuls and convolutions of one number format; totals over a step (NaN: unknown).

    Types are empty if unknown. ``accumulator_bits`` and ``mac_noise_sigma`` are texts in the program, empty
    if it has none. ``products`` is the number of matmuls that emulate one (1: no emulation).
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
    """Return one row per number format, the one with most FLOPs first. O(products)."""
    table = graph.contractions
    if not len(table):
        return ()
    text_numbers: dict[str, int] = {"": 0}
    stated: list[IntArray] = []  # for each product the number of its text
    extra = graph.extra
    for attribute in (ACCUMULATOR_BITS, MAC_NOISE_SIGMA):
        number_of_node = np.zeros(len(graph), np.int64)
        names = [row for row in np.unique(extra.key).tolist() if graph.strings[row] == attribute]
        for row in np.flatnonzero(np.isin(extra.key, names) & (extra.node >= 0)).tolist():
            text = bytes(extra.value(row)).decode("utf-8", "replace")
            if len(text) <= _MAX_TEXT and text.isprintable():
                number_of_node[int(extra.node[row])] = text_numbers.setdefault(text, len(text_numbers))
        stated.append(number_of_node[table.node])
    types = (table.lhs, table.rhs, table.accumulator)
    columns = [*(column.astype(np.int64) for column in types), table.products.astype(np.int64), *stated]
    keys, group = np.unique(np.stack(columns), axis=1, return_inverse=True)
    group = group.reshape(-1).astype(np.int64)
    texts, runs, count = tuple(text_numbers), graph.executions[table.node], keys.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # sums beyond the range of a float are infinite
        executions = np.bincount(group, runs, count)
        flops = np.bincount(group, table.flops * runs, count)
    nodes = np.bincount(group, minlength=count)
    rows: list[ProductRow] = []
    rows_of_keys: list[list[int]] = keys.T.tolist()
    for row, (*codes, products, bits, sigma) in enumerate(rows_of_keys):
        lhs, rhs, accumulator = ("" if code == UNKNOWN_DTYPE else DTYPES[code].name for code in codes)
        rows.append(
            ProductRow(
                lhs=lhs,
                rhs=rhs,
                accumulator=accumulator,
                products=products,
                accumulator_bits=texts[bits],
                mac_noise_sigma=texts[sigma],
                nodes=int(nodes[row]),
                executions=float(executions[row]),
                flops=float(flops[row]),
            )
        )
    return tuple(sorted(rows, key=lambda row: -np.nan_to_num(row.flops)))


@dataclass(frozen=True, slots=True)
class OpRow:
    """Operations of one name or class; totals over all executions in a step (NaN: unknown).

    ``nodes`` is the number of nodes in the graph, ``executions`` the number of their runs in a step,
    ``unknown`` the number of nodes without a cost.
    """

    name: str
    nodes: Count
    executions: Figure
    flops: Figure
    bytes_moved: Figure
    duration_ns: Figure
    unknown: Count


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """Collectives of one kind over one grouping of the ranks. ``comm_bytes`` is per rank and step.

    ``group_size`` is -1 if sizes differ. ``first_group`` lists the first ranks of the first group, at most
    eight.
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
    """A loop, branch, call or fusion; ``depth`` is the number of regions around it."""

    label: str
    kind: str
    depth: int
    trips: Figure
    nodes: Count


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """Contents of one rank class. ``depth`` is the longest chain of dependencies, ``width`` the largest
    number of nodes at the same depth; both are -1 if there is a cycle.
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
    collectives: tuple[CollectiveSummary, ...]
    messages: tuple[OpRow, ...]
    regions: tuple[RegionRow, ...]
    attributes: Count
    attachments: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """Contents of a measured trace: device time by category and by operation. ``negative_events`` is the
    number of events that end before they start; their time counts as 0.
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
    """Contents of a file: ``classes`` for a workload, or ``profile``."""

    name: str
    format: str
    metadata: Mapping[str, str]
    num_ranks: Count
    classes: tuple[ClassSummary, ...]
    profile: ProfileSummary | None
    source: str = ""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def headline(self) -> str:
        """Return the summary line: the name, the format, and the numbers of ranks and operations, or
        of events.
        """
        name = f"{self.source or self.name} ({self.format})"
        if self.profile is not None:
            return f"{name}, {self.profile.events:,} events on {self.profile.device or 'an unnamed device'}"
        nodes = sum(rank_class.nodes for rank_class in self.classes)
        ranks, classes = counted(self.num_ranks, "rank"), counted(len(self.classes), "class")
        return f"{name}, {ranks} in {classes}, {nodes:,} operations"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.view/1``."""
        return document_bytes(summary_document(self))

    def table(self) -> Table:
        """Return the result as a table with one row per operation name and rank class, longest total time
        first. For a profile there is one row per operation name.
        """
        if self.profile is not None:
            return table_from_records([asdict(row) for row in self.profile.by_op])
        return table_from_records(
            [
                {"rank_class": number, **asdict(row)}
                for number, rank_class in enumerate(self.classes)
                for row in rank_class.by_op
            ]
        )


_Source = Annotated[
    str | Path | Value,
    Option("File in any readable format, or folder of rank files.", metavar="SRC", is_argument=True),
]


@checked()
def view(
    source: _Source,
    *,
    format: SourceFormat = None,  # noqa: A002 # the word users know
    options: ReadingProgram = None,
    diagnostics: Diagnostics | None = None,
) -> Summary:
    """Summarise a file, a folder of rank files or a value: ranks, operations, communication, loops.

    A path is read as ``format`` (default: sniffed) with ``options``. Raises what ``read`` raises.

    Examples:
        >>> hespas.view("samples/mlp.mlir")
        <Summary: samples/mlp.mlir (stablehlo), 1 rank in 1 class, 26 operations>
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    if isinstance(source, Workload | Profile):
        name, value, form = source.name, source, source.metadata.get("format", "")
    else:
        form = find_format(Path(source), format).name
        name, value = str(source), read(source, format=form, options=options, diagnostics=sink)
    return replace(summarise(value, form), source=name, diagnostics=sink)


def summarise(value: Value, format_name: str) -> Summary:
    """Return the summary of a workload or a profile. O(nodes + edges), vectorised."""
    if isinstance(value, Profile):
        ran_ns = np.maximum(value.duration_ns, 0.0)
        total = float(ran_ns.sum())
        linked = float(ran_ns[value.host_event >= 0].sum())
        end_ns = value.start_ns + ran_ns
        profile = ProfileSummary(
            device=value.device,
            events=len(value),
            streams=len(np.unique(value.stream)),
            ranks=len(np.unique(value.rank)),
            span_ns=float(end_ns.max() - value.start_ns.min()) if len(value) else 0.0,
            duration_ns=total,
            linked_share=linked / total if total else 0.0,
            host_ops=len(value.host),
            negative_events=int((value.duration_ns < 0).sum()),
            by_category=_event_rows(value, value.category_id),
            by_op=_event_rows(value, np.where(value.op_id > 0, value.op_id, value.kernel_id)),
        )
        return Summary(value.name, format_name, dict(value.metadata), 0, (), profile)
    with np.errstate(over="ignore", invalid="ignore"):  # sums beyond the range of a float are infinite
        classes = tuple(_class_summary(value, index) for index in range(len(value.classes)))
    return Summary(value.name, format_name, dict(value.metadata), value.num_ranks, classes, None)


def _class_summary(value: Workload, index: int) -> ClassSummary:
    graph, ranks = value.classes[index], value.ranks_of(index)
    depth = width = 0 if not len(graph) else -1
    if len(graph) and not find_cycle(graph):
        level = levels(graph, [1] * len(graph))
        depth, width = max(level) + 1, int(np.bincount(level).max())
    untimed = (graph.op_class == int(OpClass.FREE)) & ~(graph.duration_ns > 0)
    all_nodes = np.ones(len(graph), np.bool_)
    messages = np.isin(graph.kind, (int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE)))

    def class_name(code: int) -> str:
        return OpClass.FREE.name.lower() if code == _UNTIMED else timed_class_name(code)

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
        by_class=_op_rows(
            graph, np.where(untimed, _UNTIMED, graph.op_class.astype(np.int64)), class_name, all_nodes
        ),
        by_op=_op_rows(graph, graph.op_id.astype(np.int64), lambda row: graph.strings[row], all_nodes),
        products=product_rows(graph),
        collectives=tuple(_collective_rows(graph, value.num_ranks)),
        messages=_op_rows(
            graph, graph.kind.astype(np.int64), lambda code: NodeKind(code).name.lower(), messages
        ),
        regions=tuple(_region_rows(graph)),
        attributes=len(graph.extra),
        attachments={name: len(content) for name, content in graph.attachments.items()},
    )


def _op_rows(
    graph: OpGraph, key: IntArray, name: Callable[[int], str], chosen: NDArray[np.bool_]
) -> tuple[OpRow, ...]:
    """Return totals of the chosen nodes, one row per value of ``key``: the longest first, then most FLOPs,
    then most nodes.
    """
    if not chosen.any():
        return ()
    codes, group = np.unique(key[chosen], return_inverse=True)
    runs = graph.executions[chosen]
    moved = graph.bytes_moved[chosen] * runs
    flops, duration_ns = graph.flops[chosen] * runs, graph.duration_ns[chosen] * runs
    count = len(codes)

    def known_sums(column: FloatArray) -> FloatArray:
        """Return the sum of the known values in each group; NaN if a group has no known value."""
        known = ~np.isnan(column)
        sums = np.bincount(group[known], weights=column[known], minlength=count)
        return np.where(np.bincount(group[known], minlength=count) > 0, sums, np.nan)

    nodes = np.bincount(group, minlength=count)
    executions, total_flops, total_moved, total_ns = map(known_sums, (runs, flops, moved, duration_ns))
    unknown = np.bincount(group, weights=np.isnan(flops) | np.isnan(moved), minlength=count)
    rows = [
        OpRow(
            name=name(int(codes[row])),
            nodes=int(nodes[row]),
            executions=float(executions[row]),
            flops=float(total_flops[row]),
            bytes_moved=float(total_moved[row]),
            duration_ns=float(total_ns[row]),
            unknown=int(unknown[row]),
        )
        for row in range(count)
    ]
    return tuple(sorted(rows, key=_sort_key))


def _sort_key(row: OpRow) -> tuple[float, float, int, str]:
    return -np.nan_to_num(row.duration_ns), -np.nan_to_num(row.flops), -row.nodes, row.name


def _collective_rows(graph: OpGraph, num_ranks: int) -> Iterator[CollectiveSummary]:
    table = graph.collectives
    runs = graph.executions[table.node]
    pairs = np.stack([table.kind.astype(np.int64), table.group_set.astype(np.int64)])
    keys, group = np.unique(pairs, axis=1, return_inverse=True)
    distinct: list[list[int]] = keys.T.tolist()
    for row, (kind, group_set) in enumerate(distinct):
        own = group.reshape(-1) == row
        groups = graph.group_sets[group_set] if group_set >= 0 else StridedGroups.all_ranks(num_ranks)
        yield CollectiveSummary(
            kind=CollectiveKind(kind).name.lower(),
            groups=groups_text(groups, num_ranks),
            num_groups=groups.num_groups,
            group_size=groups.group_size,
            first_group=first_group(groups),
            nodes=int(own.sum()),
            executions=float(runs[own].sum()),
            comm_bytes=float((table.comm_bytes[own] * runs[own]).sum()),
        )


def _region_rows(graph: OpGraph) -> Iterator[RegionRow]:
    """Yield all regions, each after the region around it."""
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


def _event_rows(profile: Profile, key: NDArray[np.int32]) -> tuple[OpRow, ...]:
    """Return totals of the events of a profile, one row per name in the column ``key``."""
    codes, group = np.unique(key, return_inverse=True)
    nodes = np.bincount(group, minlength=len(codes))
    sums = np.bincount(group, weights=np.maximum(profile.duration_ns, 0.0), minlength=len(codes))
    rows = [
        OpRow(
            name=profile.strings[int(codes[row])],
            nodes=int(nodes[row]),
            executions=float(nodes[row]),
            flops=nan,
            bytes_moved=nan,
            duration_ns=float(sums[row]),
            unknown=0,
        )
        for row in range(len(codes))
    ]
    return tuple(sorted(rows, key=_sort_key))


class SummaryDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas view --json``."""

    schema: Literal["hespas.view/1"] = "hespas.view/1"
    name: str
    format: str
    metadata: Mapping[str, str]
    num_ranks: Count
    classes: tuple[ClassSummary, ...]
    profile: ProfileSummary | None


def summary_document(summary: Summary) -> msgspec.Struct:
    """Return the document of a summary: ``hespas.view/1``."""
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
