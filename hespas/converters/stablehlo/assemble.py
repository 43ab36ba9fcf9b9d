"""From a template to an :class:`OpGraph`: columns by look-up in the table of signatures, no loop over nodes
but one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.replica_groups import IdMode, left_out, normalise_groups, normalise_pairs
from hespas.converters.stablehlo.exchange import Collective, Exchange, Message
from hespas.converters.stablehlo.template import RegionRow, Template
from hespas.converters.stablehlo.types import Signature
from hespas.converters.stablehlo.walker import Shared
from hespas.graph import (
    CollectiveTable,
    ContractionTable,
    Csr,
    ExtraTable,
    GroupSet,
    NodeKind,
    OpGraph,
    P2pTable,
    Permutation,
    RegionTable,
    Resource,
)
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import FloatArray, SmallIntArray, StringTableBuilder, constant
from hespas.graph.errors import FormatError

__all__ = ["Devices", "assemble"]


class Devices(NamedTuple):
    """How many devices run the program."""

    num_replicas: int
    num_partitions: int

    @property
    def num_devices(self) -> int:
        """Replicas times partitions."""
        return self.num_replicas * self.num_partitions

    @property
    def single_mode(self) -> IdMode:
        """What the ids of a program are that does not say: partitions, unless there is but one."""
        return IdMode.CROSS_PARTITION if self.num_partitions > 1 else IdMode.CROSS_REPLICA


def assemble(
    name: str, template: Template, shared: Shared, devices: Devices, attachments: Mapping[str, bytes]
) -> OpGraph:
    """The graph of the entry function's template; O(nodes + edges)."""
    signatures, strings = shared.signatures.rows, shared.strings
    nodes = len(template)
    which = np.array(template.signature, np.int64)
    links = _Links(template, shared, devices)
    region = _ints(template.region)
    regions = _regions(template, strings)
    located = np.array(shared.locations.rows, np.int32)[np.array(template.location, np.int64)]
    costs = [row.cost for row in signatures]

    def figure(column: str) -> FloatArray:
        return np.array([getattr(cost, column) for cost in costs], np.float64)[which]

    return OpGraph(
        name=name,
        group_sets=tuple(links.group_sets),
        permutations=tuple(links.permutations),
        id=np.arange(nodes, dtype=np.uint64),
        name_row=_node_names(template.signature, signatures, strings),
        op_row=_ints([strings.add(row.op_name) for row in signatures])[which],
        kind=links.kinds,
        op_class=np.array([int(cost.op_class) for cost in costs], np.uint8)[which],
        resource=np.broadcast_to(np.uint8(Resource.DEVICE), (nodes,)),
        stream=np.broadcast_to(np.int32(-1), (nodes,)),
        region=region,
        rate_dtype=np.array([cost.rate_dtype for cost in costs], np.int16)[which],
        source_row=located[:, 0],
        framework_row=located[:, 1],
        flops=figure("flops"),
        useful_flops=figure("useful_flops"),
        transcendentals=figure("transcendentals"),
        bytes_read=figure("bytes_read"),
        bytes_written=figure("bytes_written"),
        duration_ns=constant(float("nan"), nodes),
        multiplicity=region_multiplicity(regions, region),
        data_deps=_ragged(template.deps),
        control_deps=_control(template),
        operands=Csr.from_lists([row.operands for row in signatures]).take(which),
        results=Csr.from_lists([row.results for row in signatures]).take(which),
        collectives=links.collectives(),
        p2p=links.messages(),
        contractions=_contractions(which, signatures),
        regions=regions,
        extra=_stated(which, signatures, strings),
        attachments=attachments,
        types=shared.types.rows.build(),
        strings=strings.build(),
    )


def _ragged(rows: Sequence[Sequence[int]]) -> Csr:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Csr.from_lengths(lengths, np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())))


def _control(template: Template) -> Csr:
    control = template.control
    if not control:
        return Csr.empty(len(template))
    return Csr.from_lists([control.get(node, ()) for node in range(len(template))])


def _ints(values: Sequence[int]) -> SmallIntArray:
    return np.array(values, np.int32)


def _node_names(
    which: Sequence[int], signatures: Sequence[Signature], strings: StringTableBuilder
) -> SmallIntArray:
    """``dot_general.17``: the label of the signature and the node's number, unique in the graph."""
    labels = [row.label for row in signatures]
    return _ints([strings.add(f"{labels[row]}.{node}") for node, row in enumerate(which)])


def _regions(template: Template, strings: StringTableBuilder) -> RegionTable:
    rows: list[RegionRow] = template.regions
    edges = sorted(set(template.carried))
    carried = np.array(edges, np.int32).reshape(-1, 3)
    return RegionTable(
        parent=_ints([row.parent for row in rows]),
        kind=np.array([int(row.kind) for row in rows], np.uint8),
        trips=np.array([row.trips for row in rows], np.float64),
        label=_ints([strings.add(row.full_label) for row in rows]),
        carried_region=carried[:, 0],
        carried_producer=carried[:, 1],
        carried_consumer=carried[:, 2],
    )


def _contractions(which: NDArray[np.int64], signatures: Sequence[Signature]) -> ContractionTable:
    """Rows of the signatures that multiply matrices, repeated for each node."""
    flat = [part for row in signatures for part in row.cost.contractions]
    lengths = [len(row.cost.contractions) for row in signatures]
    index = Csr.from_lengths(np.array(lengths, np.int64), np.arange(len(flat), dtype=np.int32)).take(which)
    rows = index.values

    def column(name: str, kind: type[np.generic]) -> NDArray[np.generic]:
        return np.array([getattr(part, name) for part in flat], kind)[rows]

    return ContractionTable(
        node=index.row_ids.astype(np.int32),
        batch=column("batch", np.int64).astype(np.int64),
        m=column("m", np.int64).astype(np.int64),
        n=column("n", np.int64).astype(np.int64),
        k=column("k", np.int64).astype(np.int64),
        flops=column("flops", np.float64).astype(np.float64),
        useful_flops=column("useful_flops", np.float64).astype(np.float64),
        lhs=column("lhs", np.int16).astype(np.int16),
        rhs=column("rhs", np.int16).astype(np.int16),
        accumulator=column("accumulator", np.int16).astype(np.int16),
        products=column("products", np.uint8).astype(np.uint8),
    )


def _stated(
    which: NDArray[np.int64], signatures: Sequence[Signature], strings: StringTableBuilder
) -> ExtraTable:
    """Attributes of multiply-accumulate units, as texts (tag 0) of the nodes that state them."""
    stated = [
        {key: text for part in row.cost.contractions for key, text in part.attributes.items()}
        for row in signatures
    ]
    nodes = np.flatnonzero(np.array([bool(each) for each in stated], np.bool_)[which]).tolist()
    if not nodes:
        return ExtraTable.empty()
    rows = [(node, key, text) for node in nodes for key, text in stated[int(which[node])].items()]
    values = [text.encode() for _, _, text in rows]
    return ExtraTable(
        node=_ints([node for node, _, _ in rows]),
        key=_ints([strings.add(key) for _, key, _ in rows]),
        tag=np.zeros(len(rows), np.int16),
        offsets=np.cumsum([0, *map(len, values)], dtype=np.int64),
        values=b"".join(values),
    )


class _Links:
    """Collectives and messages of the graph, their groups made global once per distinct statement."""

    def __init__(self, template: Template, shared: Shared, devices: Devices) -> None:
        self.group_sets: dict[GroupSet, int] = {}
        self.permutations: dict[Permutation, int] = {}
        self.kinds = np.full(len(template), int(NodeKind.COMPUTE), np.uint8)
        self._shared = shared
        self._template = template
        self._devices = devices
        self._known: dict[tuple[object, IdMode], int] = {}
        self._collectives: list[tuple[int, Collective, int]] = []
        self._messages: list[tuple[int, Message, int]] = []
        for link in sorted(template.links, key=lambda link: link.node):
            self._take(link.node, shared.exchanges.rows[link.exchange])

    def _take(self, node: int, exchange: Exchange) -> None:
        if isinstance(exchange, Collective):
            self.kinds[node] = int(NodeKind.COLLECTIVE)
            self._collectives.append((node, exchange, self._groups(node, exchange)))
            return
        self.kinds[node] = int(exchange.kind)
        self._messages.append((node, exchange, self._permutation(node, exchange)))

    def _groups(self, node: int, stated: Collective) -> int:
        key = (stated.groups, stated.mode)
        row = self._known.get(key)
        if row is not None:
            return row
        devices = self._devices
        try:
            made = normalise_groups(stated.groups, stated.mode, devices.num_replicas, devices.num_partitions)
        except ValueError as error:
            raise self._refused(node, stated.kind.name.lower(), error) from error
        missing = left_out(made, devices.num_devices)
        if missing:
            message = (
                f"{missing} of {devices.num_devices} devices are in no group of {stated.kind.name.lower()}"
            )
            path = self._shared.path
            self._shared.diagnostics.warning("stablehlo.devices-left-out", path, message, path=path)
        row = self._known[key] = self.group_sets.setdefault(made, len(self.group_sets))
        return row

    def _permutation(self, node: int, stated: Message) -> int:
        if stated.pairs is None or stated.is_host:
            return -1
        mode = stated.mode or self._devices.single_mode
        key = (stated.pairs, mode)
        row = self._known.get(key)
        if row is not None:
            return row
        devices = self._devices
        try:
            made = normalise_pairs(stated.pairs, mode, devices.num_replicas, devices.num_partitions)
        except ValueError as error:
            raise self._refused(node, "collective_permute", error) from error
        row = self._known[key] = self.permutations.setdefault(made, len(self.permutations))
        return row

    def _refused(self, node: int, what: str, error: ValueError) -> FormatError:
        devices = self._devices
        stated = f"{devices.num_replicas} replicas x {devices.num_partitions} partitions"
        return FormatError(
            f"{what}: {error} ({stated})",
            path=self._shared.path,
            position=self._shared.locations.place(self._template.location[node]) or f"operation {node}",
            hint="do groups and device counts belong together?",
        )

    def collectives(self) -> CollectiveTable:
        """The collective table."""
        sets = list(self.group_sets)
        rows = self._collectives
        return CollectiveTable(
            node=_ints([node for node, _, _ in rows]),
            kind=np.array([int(each.kind) for _, each, _ in rows], np.uint8),
            group_set=_ints([group for _, _, group in rows]),
            comm_bytes=_floats([each.comm_bytes(sets[group].group_size) for _, each, group in rows]),
            operand_bytes=_floats([each.operand_bytes for _, each, _ in rows]),
            result_bytes=_floats([each.result_bytes for _, each, _ in rows]),
            channel=np.array([each.channel for _, each, _ in rows], np.int64),
            reduction=_ints([self._shared.strings.add(each.reduction) for _, each, _ in rows]),
        )

    def messages(self) -> P2pTable:
        """The point-to-point table."""
        rows = self._messages
        return P2pTable(
            node=_ints([node for node, _, _ in rows]),
            permutation=_ints([permutation for _, _, permutation in rows]),
            comm_bytes=_floats([each.comm_bytes for _, each, _ in rows]),
            tag=np.array([each.tag for _, each, _ in rows], np.int64),
            host=np.array([each.is_host for _, each, _ in rows], np.bool_),
        )


def _floats(values: Sequence[float]) -> FloatArray:
    return np.array(values, np.float64)
