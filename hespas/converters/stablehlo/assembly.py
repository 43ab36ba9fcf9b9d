"""Assembly of a program's graph from the template of its entry function (:mod:`.template`).

Most columns are looked up in the table of distinct signatures (:mod:`.node_rows`), without a loop over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.converters.replica_groups import IdMode, normalise_groups, normalise_pairs
from hespas.converters.stablehlo.communication import ProgramCollective, ProgramMessage
from hespas.converters.stablehlo.node_rows import StablehloSignature
from hespas.converters.stablehlo.template import FunctionTemplate, TemplateRegion
from hespas.converters.stablehlo.walker import ModuleContext
from hespas.graph import (
    CollectiveTable,
    ContractionTable,
    ExtraTable,
    GroupSet,
    NodeKind,
    OpGraph,
    P2pTable,
    Permutation,
    RaggedArray,
    RegionTable,
    Resource,
)
from hespas.graph.builder import region_executions
from hespas.graph.columns import FloatArray, SmallIntArray, StringTableBuilder, constant
from hespas.graph.errors import FormatError

__all__ = ["DeviceCounts", "assemble"]

_Small = TypeVar("_Small", np.int64, np.int16, np.uint8)


class DeviceCounts(NamedTuple):
    """Numbers of replicas and partitions of a program."""

    num_replicas: int
    num_partitions: int

    @property
    def num_devices(self) -> int:
        """Number of replicas times number of partitions."""
        return self.num_replicas * self.num_partitions

    @property
    def single_mode(self) -> IdMode:
        """Meaning of device ids in operations that do not state it: partition ids, or replica ids if there is
        one partition.
        """
        return IdMode.CROSS_PARTITION if self.num_partitions > 1 else IdMode.CROSS_REPLICA


def assemble(
    name: str,
    template: FunctionTemplate,
    shared: ModuleContext,
    devices: DeviceCounts,
    attachments: Mapping[str, bytes],
) -> OpGraph:
    """Build the graph of a program from the template of its entry function. O(nodes + edges)."""
    signatures, strings = shared.signatures.rows, shared.strings
    nodes = len(template)
    which = np.array(template.signature, np.int64)
    links = _ProgramCommTables(template, shared, devices)
    region = _ints(template.region)
    region_rows: list[TemplateRegion] = template.regions
    edges = sorted(set(template.carried))
    carried = np.array(edges, np.int32).reshape(-1, 3)
    regions = RegionTable(
        parent=_ints([row.parent for row in region_rows]),
        kind=np.array([int(row.kind) for row in region_rows], np.uint8),
        trips=np.array([row.trips for row in region_rows], np.float64),
        label=_ints([strings.add(row.full_label) for row in region_rows]),
        carried_region=carried[:, 0],
        carried_producer=carried[:, 1],
        carried_consumer=carried[:, 2],
    )
    located = np.array(shared.locations.rows, np.int32)[np.array(template.location, np.int64)]
    costs = [row.cost for row in signatures]

    def figure(column: str) -> FloatArray:
        return np.array([getattr(cost, column) for cost in costs], np.float64)[which]

    lengths = np.fromiter(map(len, template.deps), np.int64, len(template.deps))
    labels = [row.label for row in signatures]
    return OpGraph(
        name=name,
        group_sets=tuple(links.group_sets),
        permutations=tuple(links.permutations),
        id=np.arange(nodes, dtype=np.uint64),
        name_id=_ints([strings.add(f"{labels[row]}.{node}") for node, row in enumerate(template.signature)]),
        op_id=_ints([strings.add(row.op_name) for row in signatures])[which],
        kind=links.kinds,
        op_class=np.array([int(cost.op_class) for cost in costs], np.uint8)[which],
        resource=np.broadcast_to(np.uint8(Resource.DEVICE), (nodes,)),
        stream=np.broadcast_to(np.int32(-1), (nodes,)),
        region=region,
        rate_dtype=np.array([cost.rate_dtype for cost in costs], np.int16)[which],
        source_id=located[:, 0],
        framework_id=located[:, 1],
        flops=figure("flops"),
        useful_flops=figure("useful_flops"),
        transcendentals=figure("transcendentals"),
        bytes_read=figure("bytes_read"),
        bytes_written=figure("bytes_written"),
        duration_ns=constant(float("nan"), nodes),
        executions=region_executions(regions, region),
        data_deps=RaggedArray.from_lengths(
            lengths, np.fromiter(chain.from_iterable(template.deps), np.int32, int(lengths.sum()))
        ),
        control_deps=(
            RaggedArray.from_lists([template.control.get(node, ()) for node in range(nodes)])
            if template.control
            else RaggedArray.empty(nodes)
        ),
        operands=RaggedArray.from_lists([row.operands for row in signatures]).take(which),
        results=RaggedArray.from_lists([row.results for row in signatures]).take(which),
        collectives=links.collectives(),
        p2p=links.messages(),
        contractions=_contractions(which, signatures),
        regions=regions,
        extra=_low_bit_attributes(which, signatures, strings),
        attachments=attachments,
        types=shared.types.rows.build(),
        strings=strings.build(),
    )


def _ints(values: Sequence[int]) -> SmallIntArray:
    return np.array(values, np.int32)


def _contractions(node_rows: NDArray[np.int64], signatures: Sequence[StablehloSignature]) -> ContractionTable:
    """Return the contraction table (matmuls and convolutions) of a graph. ``node_rows`` has, for each node,
    the index of its signature.
    """
    flat = [part for row in signatures for part in row.cost.contractions]
    lengths = [len(row.cost.contractions) for row in signatures]
    index = RaggedArray.from_lengths(np.array(lengths, np.int64), np.arange(len(flat), dtype=np.int32)).take(
        node_rows
    )
    rows = index.values

    def integers(name: str, kind: type[_Small]) -> NDArray[_Small]:
        return np.array([getattr(part, name) for part in flat], kind)[rows]

    def figures(name: str) -> FloatArray:
        return np.array([getattr(part, name) for part in flat], np.float64)[rows]

    return ContractionTable(
        node=index.row_ids.astype(np.int32),
        batch=integers("batch", np.int64),
        m=integers("m", np.int64),
        n=integers("n", np.int64),
        k=integers("k", np.int64),
        flops=figures("flops"),
        useful_flops=figures("useful_flops"),
        lhs=integers("lhs", np.int16),
        rhs=integers("rhs", np.int16),
        accumulator=integers("accumulator", np.int16),
        products=integers("products", np.uint8),
        window=integers("window", np.int64),
    )


def _low_bit_attributes(
    node_rows: NDArray[np.int64], signatures: Sequence[StablehloSignature], strings: StringTableBuilder
) -> ExtraTable:
    """Return the attributes about narrow or analogue accumulators of matmuls, and the configurations of
    custom calls on quantised tensors, as text rows (tag 0) of the ``extra`` table.
    """
    attributes = [
        {key: text for part in row.cost.contractions for key, text in part.attributes.items()}
        | ({"backend_config": row.config} if row.config else {})
        for row in signatures
    ]
    nodes = np.flatnonzero(np.array([bool(entry) for entry in attributes], np.bool_)[node_rows]).tolist()
    if not nodes:
        return ExtraTable.empty()
    rows = [(node, key, text) for node in nodes for key, text in attributes[int(node_rows[node])].items()]
    values = [text.encode() for _, _, text in rows]
    return ExtraTable(
        node=_ints([node for node, _, _ in rows]),
        key=_ints([strings.add(key) for _, key, _ in rows]),
        tag=np.zeros(len(rows), np.int16),
        offsets=np.cumsum([0, *map(len, values)], dtype=np.int64),
        values=b"".join(values),
    )


class _ProgramCommTables:
    """Builder of the collective and message tables of a program. Equal groups are converted to global device
    ids once.
    """

    def __init__(self, template: FunctionTemplate, shared: ModuleContext, devices: DeviceCounts) -> None:
        self.group_sets: dict[GroupSet, int] = {}
        self.permutations: dict[Permutation, int] = {}
        self.kinds = np.full(len(template), int(NodeKind.COMPUTE), np.uint8)
        self._shared = shared
        self._template = template
        self._devices = devices
        self._known: dict[tuple[object, IdMode], int] = {}
        self._collectives: list[tuple[int, ProgramCollective, int]] = []
        self._messages: list[tuple[int, ProgramMessage, int]] = []
        for node, row in sorted(template.links):
            communication = shared.communications.rows[row]
            if isinstance(communication, ProgramCollective):
                self.kinds[node] = int(NodeKind.COLLECTIVE)
                self._collectives.append((node, communication, self._groups(node, communication)))
            else:
                self.kinds[node] = int(communication.kind)
                self._messages.append((node, communication, self._permutation(node, communication)))

    def _groups(self, node: int, collective: ProgramCollective) -> int:
        """Return the index of a collective's group set, in global device ids."""
        key, devices = (collective.groups, collective.mode), self._devices
        if key in self._known:
            return self._known[key]
        name = collective.kind.name.lower()
        try:
            made = normalise_groups(*key, devices.num_replicas, devices.num_partitions)
        except ValueError as error:
            raise self._refused(node, name, error) from error
        missing = devices.num_devices - made.num_ranks
        if missing:
            message = f"{missing} of {devices.num_devices} devices are in no group of {name}"
            path = self._shared.path
            self._shared.diagnostics.warning("stablehlo.devices-left-out", path, message, path=path)
        self._known[key] = self.group_sets.setdefault(made, len(self.group_sets))
        return self._known[key]

    def _permutation(self, node: int, message: ProgramMessage) -> int:
        if message.pairs is None or message.is_host:
            return -1
        devices = self._devices
        key = (message.pairs, message.mode or devices.single_mode)
        if key not in self._known:
            try:
                made = normalise_pairs(*key, devices.num_replicas, devices.num_partitions)
            except ValueError as error:
                raise self._refused(node, "collective_permute", error) from error
            self._known[key] = self.permutations.setdefault(made, len(self.permutations))
        return self._known[key]

    def _refused(self, node: int, what: str, error: ValueError) -> FormatError:
        devices = self._devices
        counts = f"{devices.num_replicas} replicas x {devices.num_partitions} partitions"
        return FormatError(
            f"{what}: {error} ({counts})",
            position=self._shared.locations.place(self._template.location[node]) or f"operation {node}",
            hint="check that the groups fit the number of devices",
        )

    def collectives(self) -> CollectiveTable:
        """Build the collective table."""
        sets = list(self.group_sets)
        rows = self._collectives
        return CollectiveTable(
            node=_ints([node for node, _, _ in rows]),
            kind=np.array([int(collective.kind) for _, collective, _ in rows], np.uint8),
            group_set=_ints([group for _, _, group in rows]),
            comm_bytes=_floats(
                [collective.comm_bytes(sets[group].group_size) for _, collective, group in rows]
            ),
            operand_bytes=_floats([collective.operand_bytes for _, collective, _ in rows]),
            result_bytes=_floats([collective.result_bytes for _, collective, _ in rows]),
            channel=np.array([collective.channel for _, collective, _ in rows], np.int64),
            reduction=_ints([self._shared.strings.add(collective.reduction) for _, collective, _ in rows]),
        )

    def messages(self) -> P2pTable:
        """Build the table of messages."""
        rows = self._messages
        return P2pTable(
            node=_ints([node for node, _, _ in rows]),
            permutation=_ints([permutation for _, _, permutation in rows]),
            comm_bytes=_floats([message.comm_bytes for _, message, _ in rows]),
            tag=np.array([message.tag for _, message, _ in rows], np.int64),
            host=np.array([message.is_host for _, message, _ in rows], np.bool_),
        )


def _floats(values: Sequence[float]) -> FloatArray:
    return np.array(values, np.float64)
