"""One function as flat lists, ready to be copied into its callers; that of the entry becomes the graph.

A node's dependencies are node numbers of the template, or ``-1 - i`` for its argument ``i``, which the copy
replaces by what the caller passes. Loop-carried values are *slots*: numbers below ``-1 - arguments`` while
a function is being read, replaced by their initial producers in every dependency and remembered as carried
edges. So a value is a tuple of integers (a :data:`Flow`), or a :class:`TupleFlow` of them where its type is
a tuple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.converters.replica_groups import IdMode, normalise_groups, normalise_pairs
from hespas.converters.stablehlo.communication import Collective, Communication, Message
from hespas.converters.stablehlo.types import Signature
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
    RegionKind,
    RegionTable,
    Resource,
)
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import FloatArray, SmallIntArray, StringTableBuilder, constant
from hespas.graph.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from hespas.converters.stablehlo.walker import Shared

__all__ = [
    "MAX_NODES",
    "Devices",
    "Flow",
    "RegionRow",
    "Scope",
    "Slot",
    "Template",
    "TupleFlow",
    "Value",
    "assemble",
    "check_size",
    "flatten",
]

_Small = TypeVar("_Small", np.int64, np.int16, np.uint8)

Flow = tuple[int, ...]
"""Who makes a value: nodes (>= 0), arguments and slots (< 0). Empty: a constant of the program's start."""


@dataclass(slots=True, eq=False)
class TupleFlow:
    """A value of tuple type: the flows of its elements. No tuple itself, so that it is told from a flow."""

    elements: tuple[Value, ...]


Value = Flow | TupleFlow


def flatten(value: Value) -> Flow:
    """All producers of a value, whatever its nesting; each once, in order."""
    if isinstance(value, tuple):
        return value
    pending, found = list(reversed(value.elements)), dict[int, None]()
    while pending:
        element = pending.pop()
        if isinstance(element, tuple):
            found.update(dict.fromkeys(element))
        else:
            pending.extend(reversed(element.elements))
    return tuple(found)


class RegionRow(NamedTuple):
    """One region of a template; ``parent`` is a row of the same template, -1 for its top.

    ``header`` is the node of the operation that owns the region (-1: none): with it, ``while`` becomes the
    label ``while.17``, which a loop's condition and body share; ``branch`` counts the branches of a header
    (-1: none). ``manual`` are the mesh axes over which it has the shapes of one device (see
    :mod:`.sharded`), beside those of its parents.
    """

    kind: RegionKind
    parent: int
    trips: float
    label: str
    header: int = -1
    branch: int = -1
    manual: frozenset[str] = frozenset()

    @property
    def full_label(self) -> str:
        """The label with the header's number and the branch's."""
        return ".".join([self.label, *(str(number) for number in (self.header, self.branch) if number >= 0)])


class Slot(NamedTuple):
    """A value a loop carries: what it starts with, and the nodes that use it with their region."""

    initial: Value
    region: int
    users: list[int]


class Template:
    """The nodes of one function in program order; columns have one entry per node.

    ``signature`` rows say what a node is and costs. ``control`` lists control dependencies of the few nodes
    that have any. ``links`` are (node, row of the reader's list) of those that talk to other devices,
    ``results`` the values the function returns.
    """

    def __init__(self, name: str, num_arguments: int) -> None:
        self.name = name
        self.num_arguments = num_arguments
        self.signature: list[int] = []
        self.deps: list[Flow] = []
        self.region: list[int] = []
        self.location: list[int] = []
        self.control: dict[int, Flow] = {}
        self.regions: list[RegionRow] = []
        self.carried: list[tuple[int, int, int]] = []
        self.links: list[tuple[int, int]] = []
        self.results: Sequence[Value] = ()

    def __len__(self) -> int:
        return len(self.signature)


# Builds a :class:`Template`: nodes, dependencies, regions, copies of called functions.

MAX_NODES = 4_000_000
"""Calls that call twice each double a program per level: past this, the copy is refused before it is made."""


def check_size(function: str, nodes: int) -> None:
    """Raise ``UnsupportedError`` for a function of too many operations once calls are inlined."""
    if nodes > MAX_NODES:
        raise UnsupportedError(
            f"function @{function} has over {MAX_NODES:,} operations once calls are inlined",
            hint="check that functions do not call one another many times over",
        )


class Scope:
    """One function under construction."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._slots: list[Slot] = []
        self._first_slot = -1 - template.num_arguments

    def add(self, signature: int, inputs: Sequence[Value], region: int, location: int = 0) -> int:
        """Append a node that needs ``inputs``; returns its number."""
        template = self.template
        node = len(template.signature)
        template.signature.append(signature)
        template.deps.append(self._deps(inputs, node))
        template.region.append(region)
        template.location.append(location)
        return node

    def widen(self, node: int, inputs: Sequence[Value]) -> None:
        """Make a node need ``inputs`` too."""
        deps = self.template.deps
        deps[node] = tuple(dict.fromkeys((*deps[node], *self._deps(inputs, node))))

    def _deps(self, inputs: Sequence[Value], node: int) -> Flow:
        """Nodes and arguments behind ``inputs``; slots give their start, and remember ``node`` as their
        user.
        """
        if len(inputs) == 1 and not self._slots:
            return flatten(inputs[0])
        flat: list[int] = []
        for value in inputs:
            flat.extend(value if isinstance(value, tuple) else flatten(value))
        if self._slots and flat and min(flat) <= self._first_slot:
            return self._through_slots(flat, node)
        return tuple(dict.fromkeys(flat))

    def _through_slots(self, flat: Sequence[int], node: int) -> Flow:
        merged: dict[int, None] = {}
        for producer in flat:
            if producer > self._first_slot:
                merged[producer] = None
            else:
                self._expand(producer, node, merged)
        return tuple(merged)

    def _expand(self, number: int, node: int, merged: dict[int, None]) -> None:
        """Follow a slot to what its loop, and the loops around it, start with. O(loop depth)."""
        pending = [number]
        seen: set[int] = set()
        while pending:
            producer = pending.pop()
            if producer > self._first_slot:
                merged[producer] = None
            elif producer not in seen:
                seen.add(producer)
                slot = self._slots[self._first_slot - producer]
                slot.users.append(node)
                pending.extend(flatten(slot.initial))

    def new_slots(self, initial: Sequence[Value], region: int) -> list[Flow]:
        """Flows of the values that a loop region starts with ``initial`` and carries."""
        first = self._first_slot - len(self._slots)
        self._slots.extend(Slot(value, region, []) for value in initial)
        return [(first - place,) for place in range(len(initial))]

    def handed_on(self, slots: Sequence[Flow], yielded: Sequence[Value], first_node: int) -> list[int]:
        """Places of the yielded values that a trip does not make itself: another slot, or something from
        outside the loop, which begins at ``first_node``. A slot that keeps its value is not among them.
        """
        return [
            place
            for place, (value, own) in enumerate(zip(yielded, slots, strict=False))
            if any(producer < first_node and producer != own[0] for producer in flatten(value))
        ]

    def close_loop(self, slots: Sequence[Flow], yielded: Sequence[Value], first_node: int) -> list[Value]:
        """Record carried edges of a loop whose body yields ``yielded``; returns the flows of its results.

        ``first_node`` is the first node of a trip; values that are :meth:`handed_on` have a node of their
        own by now. A slot that keeps its value has no edge, and its result is what the loop starts with.
        """
        for (number,), value in zip(slots, yielded, strict=True):
            slot = self._slots[self._first_slot - number]
            producers = [node for node in flatten(value) if node >= first_node]
            edges = [(slot.region, producer, user) for producer in producers for user in slot.users]
            self.template.carried.extend(edges)
        return [self._after_loop(value) for value in yielded]

    def _after_loop(self, value: Value) -> Value:
        """What a loop's result is made of: the last trip's producers, the start of a slot that keeps its
        value.
        """
        found: dict[int, None] = {}
        for producer in flatten(value):
            is_slot = producer <= self._first_slot
            start = flatten(self._slots[self._first_slot - producer].initial) if is_slot else (producer,)
            found.update(dict.fromkeys(start))
        return tuple(found)

    def open_region(self, region: RegionRow) -> int:
        """Open a region and return its row."""
        self.template.regions.append(region)
        return len(self.template.regions) - 1

    def set_trips(self, region: int, trips: float) -> None:
        """State how often a region runs."""
        self.template.regions[region] = self.template.regions[region]._replace(trips=trips)

    def guard(self, first: int, decision: Value) -> None:
        """Make the nodes from ``first`` on wait for ``decision``, each by itself or through another of them.

        Where a loop carries the decision, they wait for the one made in the trip before.
        """
        template = self.template
        for node in range(first, len(template)):
            if max(template.deps[node], default=-1) >= first:
                continue
            before = template.control.get(node, ())
            if max(before, default=-1) < first:
                template.control[node] = tuple(dict.fromkeys((*before, *self._deps([decision], node))))

    def copy(
        self, callee: Template, arguments: Sequence[Value], region: int, locations: Sequence[int]
    ) -> list[Value]:
        """Append the nodes of a called function, which run at ``locations``, and return the flows of its
        results.
        """
        template = self.template
        base, first_region = len(template), len(template.regions)
        check_size(template.name, base + len(callee))
        flows = [flatten(value) for value in arguments]
        for offset, deps in enumerate(callee.deps):
            if not deps or min(deps) >= 0:
                template.deps.append(tuple([base + dep for dep in deps]))
            else:
                inputs = [(base + dep,) if dep >= 0 else flows[-1 - dep] for dep in deps]
                template.deps.append(self._deps(inputs, base + offset))
        template.signature.extend(callee.signature)
        template.location.extend(locations)
        template.region.extend([first_region + row if row >= 0 else region for row in callee.region])
        for row in callee.regions:
            parent = first_region + row.parent if row.parent >= 0 else region
            header = base + row.header if row.header >= 0 else -1
            template.regions.append(row._replace(parent=parent, header=header))
        template.carried.extend(
            (first_region + row, base + producer, base + consumer)
            for row, producer, consumer in callee.carried
        )
        template.links.extend((base + node, row) for node, row in callee.links)
        for node, control in callee.control.items():
            inputs = [(base + dep,) if dep >= 0 else flows[-1 - dep] for dep in control]
            template.control[base + node] = self._deps(inputs, base + node)
        return [_moved(value, base, flows) for value in callee.results]


def _moved(value: Value, base: int, flows: Sequence[Flow]) -> Value:
    """A callee's result as the caller sees it. Tuples nest as deep as their type, which the reader bounds."""
    if isinstance(value, TupleFlow):
        return TupleFlow(tuple(_moved(element, base, flows) for element in value.elements))
    found: dict[int, None] = {}
    for producer in value:
        found.update(dict.fromkeys((base + producer,) if producer >= 0 else flows[-1 - producer]))
    return tuple(found)


# --- From a template to an :class:`OpGraph`: columns by look-up in the table of signatures, no loop over
# nodes but one.


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
        operands=RaggedArray.from_lists([row.operands for row in signatures]).take(which),
        results=RaggedArray.from_lists([row.results for row in signatures]).take(which),
        collectives=links.collectives(),
        p2p=links.messages(),
        contractions=_contractions(which, signatures),
        regions=regions,
        extra=_stated(which, signatures, strings),
        attachments=attachments,
        types=shared.types.rows.build(),
        strings=strings.build(),
    )


def _ragged(rows: Sequence[Sequence[int]]) -> RaggedArray:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return RaggedArray.from_lengths(
        lengths, np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
    )


def _control(template: Template) -> RaggedArray:
    control = template.control
    if not control:
        return RaggedArray.empty(len(template))
    return RaggedArray.from_lists([control.get(node, ()) for node in range(len(template))])


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
    index = RaggedArray.from_lengths(np.array(lengths, np.int64), np.arange(len(flat), dtype=np.int32)).take(
        which
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
        for node, row in sorted(template.links):
            self._take(node, shared.communications.rows[row])

    def _take(self, node: int, communication: Communication) -> None:
        if isinstance(communication, Collective):
            self.kinds[node] = int(NodeKind.COLLECTIVE)
            self._collectives.append((node, communication, self._groups(node, communication)))
            return
        self.kinds[node] = int(communication.kind)
        self._messages.append((node, communication, self._permutation(node, communication)))

    def _groups(self, node: int, stated: Collective) -> int:
        """The row of a collective's groups, made global once for each distinct statement."""
        key, devices = (stated.groups, stated.mode), self._devices
        if key in self._known:
            return self._known[key]
        name = stated.kind.name.lower()
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

    def _permutation(self, node: int, stated: Message) -> int:
        if stated.pairs is None or stated.is_host:
            return -1
        devices = self._devices
        key = (stated.pairs, stated.mode or devices.single_mode)
        if key not in self._known:
            try:
                made = normalise_pairs(*key, devices.num_replicas, devices.num_partitions)
            except ValueError as error:
                raise self._refused(node, "collective_permute", error) from error
            self._known[key] = self.permutations.setdefault(made, len(self.permutations))
        return self._known[key]

    def _refused(self, node: int, what: str, error: ValueError) -> FormatError:
        devices = self._devices
        stated = f"{devices.num_replicas} replicas x {devices.num_partitions} partitions"
        return FormatError(
            f"{what}: {error} ({stated})",
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
