"""Device events of a profile: their roles, bounds of their work, and the nodes that they form.

Role and bounds come from kernel name, launch and category. Events form one node for each host operation whose
cost covers them.

An operation of the cost table covers all work launched inside it, whatever it calls. If one such operation is
inside another, the outer one covers the work of both, so nothing is costed twice. An operation that is costed
by its parts covers work only if none of its parts does. Work of an operation without a rule belongs to an
enclosing operation with a rule, else to itself, with an unknown cost. A region (a range around compiled
operations) is not an operation: its kernels have no owner, and are known by name alone. Copies between host
and device use another link, and communication kernels use the network: both are nodes of their own. So are
events without an owner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from math import isnan, nan

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.instructions import names_instruction
from hespas.costs.aten import find_aten_rule, is_composite
from hespas.costs.kernels import KernelFacts, WorkBounds, kernel_facts, launch_of, work_bounds
from hespas.graph import HostOps, OpClass, Profile, StringTable
from hespas.graph.columns import (
    BoolArray,
    FloatArray,
    IntArray,
    SmallIntArray,
    at_rows,
    distinct_rows,
    equal_rows,
    mapped,
)
from hespas.graph.passes import is_runtime_copy

__all__ = [
    "EventGroups",
    "EventRole",
    "KernelBounds",
    "WorkOwners",
    "bounds_of",
    "bounds_text",
    "event_roles",
    "group_events",
    "is_to_device",
    "kernel_bounds",
    "owners_of",
]

_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH", "CopyHostToDevice", "CopyDeviceToHost")
_HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation"})
"""Event categories of a run without a device. Such an operation may start a communication, but is not the
communication itself.
"""


class EventRole(IntEnum):
    """Role of a device event in its operation: kernel, copy from or to the host, communication, copy on the
    device, or fill.
    """

    WORK = 0
    HOST_COPY = 1
    COMMUNICATION = 2
    DEVICE_COPY = 3
    FILL = 4


def is_to_device(kernel: str) -> bool:
    """Return True if a copy between host and device goes to the device."""
    return "HtoD" in kernel or "HostToDevice" in kernel


def event_roles(profile: Profile) -> NDArray[np.uint8]:
    """Return the role of each event (work, communication, copy, ...). It follows from the communication that
    the profile states, the kernel name and the category.

    Analyses, graphs and simulations use these roles, so that all agree on the communicating events. Each
    distinct pair of name and category is evaluated once.
    """
    strings = profile.strings

    def role(pair: int) -> EventRole:
        kernel, category = strings[pair >> 32], strings[pair & 0xFFFFFFFF]
        if kernel.startswith(_HOST_COPIES):
            return EventRole.HOST_COPY
        if "memset" in category or "memcpy" in category or is_runtime_copy(kernel):
            is_fill = "memset" in f"{category} {kernel}".lower()
            return EventRole.FILL if is_fill else EventRole.DEVICE_COPY
        is_collective = kernel_facts(kernel).op_class is OpClass.COLLECTIVE
        return (
            EventRole.COMMUNICATION if is_collective and category not in _HOST_CATEGORIES else EventRole.WORK
        )

    roles = mapped((profile.kernel_id.astype(np.int64) << 32) | profile.category_id, role, np.uint8)
    roles[np.isin(profile.op_class, (OpClass.COLLECTIVE, OpClass.P2P))] = EventRole.COMMUNICATION
    roles[profile.comms.event] = EventRole.COMMUNICATION
    return roles


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelBounds:
    """Lower and upper bounds of the work of each event, derived from its kernel name and its launch shape.

    Columns have shape ``(events,)``; NaN is unknown. ``op_class`` is an ``OpClass`` code, ``fact`` the index
    of the kernel's name in ``facts``. ``elements`` counts elements of results; ``bytes`` are read and written
    bytes together. Bytes of copies, fills and communication come from the profiler. Costs are not derived
    from these bounds.
    """

    facts: tuple[KernelFacts, ...]
    fact: SmallIntArray
    op_class: NDArray[np.uint8]
    flops_low: FloatArray
    flops_high: FloatArray
    bytes_low: FloatArray
    bytes_high: FloatArray
    elements_low: FloatArray
    elements_high: FloatArray

    @property
    def known(self) -> BoolArray:
        """Return a mask of the events for which a bound of the work is known."""
        has_bound = np.zeros(len(self.op_class), np.bool_)
        for name in WorkBounds._fields:
            has_bound |= ~np.isnan(getattr(self, name))
        return has_bound


def kernel_bounds(profile: Profile) -> KernelBounds:
    """Return the bounds of the work of all events, from kernel names and launch shapes. Each kernel name is
    parsed once, and once with each of its launch shapes. O(events).
    """
    strings = profile.strings
    names, fact = np.unique(profile.kernel_id, return_inverse=True)
    facts = tuple(kernel_facts(strings[row]) for row in names.tolist())
    pairs, index = distinct_rows(fact.reshape(-1), profile.grid_id)
    rows = [bounds_of(facts[number], strings[grid]) for number, grid in pairs]
    values = np.array(rows, np.float64).reshape(-1, len(WorkBounds._fields))[index].T
    columns = dict(zip(WorkBounds._fields, values, strict=True))
    roles = event_roles(profile)
    one_side = (roles == EventRole.HOST_COPY) | (roles == EventRole.FILL)
    low = np.where(one_side, profile.bytes_moved, nan)
    low = np.where(roles == EventRole.DEVICE_COPY, 2 * profile.bytes_moved, low)
    high, comms = low.copy(), profile.comms
    largest = np.fmax(comms.operand_bytes, comms.result_bytes)  # one side of a collective may be unknown
    both = comms.operand_bytes + comms.result_bytes
    low[comms.event], high[comms.event] = np.where(np.isnan(both), largest, both), both
    for name, moved in (("bytes_low", low), ("bytes_high", high)):
        columns[name] = np.where(np.isnan(moved), columns[name], moved)
    classes = np.array([facts_of_kernel.op_class for facts_of_kernel in facts], np.uint8)
    number = fact.reshape(-1).astype(np.int32)
    return KernelBounds(facts=facts, fact=number, op_class=classes[number], **columns)


def bounds_of(facts: KernelFacts, grid: str) -> WorkBounds:
    """Return the bounds of the work of one kernel from its launch shape (see :attr:`Profile.grid_id`), or
    from its name alone.
    """
    launch = launch_of(grid)
    return work_bounds(facts) if launch is None else work_bounds(facts, *launch)


def bounds_text(bounds: WorkBounds) -> str:
    """Return the known bounds as JSON: ``{"elements":[low,high]}``. A bound that is unknown is null."""
    values = bounds._asdict()
    ranges: dict[str, list[float | None]] = {}
    for name in ("flops", "bytes", "elements"):
        ends = [values[f"{name}_low"], values[f"{name}_high"]]
        if not all(map(isnan, ends)):
            ranges[name] = [None if isnan(end) else end for end in ends]
    return msgspec.json.encode(ranges).decode()


_REGION = re.compile(
    r"Torch-Compiled Region.*|CompiledFunction(?:Backward)?\d*|(?:## )?(?:Call )?CompiledFxGraph.*|"
    r"autograd::engine::evaluate_function.*|ProfilerStep#.*|Optimizer\.\w+#.*|nn\.Module: .*|"
    r"(?:DistributedDataParallel|FullyShardedDataParallel|FSDP::|DDP)\b.*|torch::jit::.*|"
    r"(?:Pregraph|AOTDispatcher|DynamoRuntimeWrapper|TorchDynamo|CompiledAutograd).*",
    re.DOTALL,
)
"""Names of ranges around operations."""
_MAX_DEPTH = 256
"""Maximum number of enclosing operations. Real operations nest a few dozen deep."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkOwners:
    """Owner of each kernel, copy or fill: the host operation to which the work is attributed.

    ``op`` is the owning operation (-1: none). ``answers`` is True if the cost of this operation covers the
    work; otherwise the cost of the work is unknown.
    """

    op: IntArray
    answers: BoolArray


def owners_of(host: HostOps, strings: StringTable, launched_by: IntArray) -> WorkOwners:
    """Return the host operation to which each piece of device work is attributed. ``launched_by`` is the
    innermost operation that launched the work (-1: unknown). O(distinct launching operations x depth).
    """
    if not len(host):
        return WorkOwners(np.full(len(launched_by), -1, np.int64), np.zeros(len(launched_by), np.bool_))
    has_rule = mapped(host.name_id, lambda row: find_aten_rule(strings[row]) is not None, np.bool_)
    is_by_parts = mapped(host.name_id, lambda row: is_composite(strings[row]), np.bool_)
    has_cost = has_rule & (host.shapes_id != 0)
    parents: list[int] = host.parent.tolist()
    launchers, index = np.unique(launched_by, return_inverse=True)
    chains: dict[int, list[int]] = {}  # launching operation -> it and its enclosing ones, innermost first
    operations: list[int] = launchers[launchers >= 0].tolist()
    for launcher in operations:
        chain: list[int] = []
        op = launcher
        while 0 <= op < len(parents) and len(chain) < _MAX_DEPTH:
            chain.append(op)
            op = parents[op]
        chains[launcher] = chain

    def outermost(chain: list[int], owners: frozenset[int]) -> int:
        return next((op for op in reversed(chain) if op in owners), -1)

    whole = _innermost(chains, has_cost & ~is_by_parts)
    owner = {op: outermost(chain, whole) for op, chain in chains.items()}
    covered = {outer for op, chain in chains.items() if owner[op] >= 0 for outer in chain}
    remaining = {op: chain for op, chain in chains.items() if owner[op] < 0}
    by_parts = _innermost(remaining, has_cost & is_by_parts) - covered
    owner |= {op: outermost(chain, by_parts) for op, chain in remaining.items()}
    owners = np.array([owner.get(int(op), -1) for op in launchers], np.int64)
    regions = mapped(host.name_id, lambda row: _REGION.fullmatch(strings[row]) is not None, np.bool_)
    own = np.where(at_rows(regions, launchers, False), -1, launchers)
    return WorkOwners(np.where(owners >= 0, owners, own)[index], (owners >= 0)[index])


def _innermost(chains: dict[int, list[int]], mask: BoolArray) -> frozenset[int]:
    """Return, for each chain of enclosing operations, the innermost operation that is marked in ``mask``."""
    selected: list[bool] = mask.tolist()
    innermost = (next((op for op in chain if selected[op]), -1) for chain in chains.values())
    return frozenset(op for op in innermost if op >= 0)


@dataclass(frozen=True, slots=True, eq=False)
class EventGroups:
    """Events grouped into nodes, which are numbered by their first start.

    ``node`` is the node of each event. The other columns have one entry per node. ``host_op`` is the host
    operation (-1: none), and ``answers`` is True if the cost of that operation covers the node. ``longest``
    is the longest event, and ``stream`` its stream. ``busy_ns`` is the sum of event times, and
    ``duration_ns`` the time during which any event ran. An event that ends before it starts adds no time.
    """

    node: SmallIntArray
    role: NDArray[np.uint8]
    host_op: IntArray
    answers: BoolArray
    longest: IntArray
    stream: IntArray
    busy_ns: FloatArray
    duration_ns: FloatArray


def group_events(profile: Profile) -> EventGroups:
    """Group the events of a profile into nodes. The events of one run of an operation are one node. O(events
    log events).
    """
    count, strings = len(profile), profile.strings
    role = event_roles(profile)
    launched_by = profile.host_event.astype(np.int64)
    owners = owners_of(profile.host, strings, launched_by)
    is_host_copy = role == EventRole.HOST_COPY
    # A copy to or from the host belongs to the operation that copies, not to enclosing operations.
    owner = np.where(is_host_copy, launched_by, owners.op)
    has_launch = np.flatnonzero(np.isfinite(profile.launch_start_ns))
    _, launch = equal_rows(
        profile.launch_start_ns[has_launch], profile.launch_thread_id[has_launch], profile.rank[has_launch]
    )
    of_one_launch = np.zeros(count, np.bool_)  # events of one launch replay a graph
    of_one_launch[has_launch] = np.bincount(launch)[launch] > 1 if len(has_launch) else False
    replayed = ~owners.answers & ~is_host_copy & of_one_launch
    owner[replayed | names_instruction(profile)] = -1
    alone = (owner < 0) | (role == EventRole.COMMUNICATION)
    is_part = ((role == EventRole.DEVICE_COPY) | (role == EventRole.FILL)) & ~alone & owners.answers
    role = np.where(is_part, EventRole.WORK, role).astype(np.uint8)
    # An operation without a rule is one node for each class of its kernels.
    classes = mapped(profile.kernel_id, lambda row: kernel_facts(strings[row]).op_class, np.uint8)
    part = np.where(owners.answers | is_host_copy, role, len(EventRole) + classes)
    num_parts = len(EventRole) + len(OpClass)
    # One number per node: of the operation and its part, or of the event itself.
    number = np.where(alone, -1 - np.arange(count, dtype=np.int64), owner * num_parts + part)
    _, first_seen, group = np.unique(number, return_index=True, return_inverse=True)
    starts = np.full(len(first_seen), np.inf)
    np.fmin.at(starts, group, profile.start_ns)  # unknown starts are ignored
    order = np.lexsort((first_seen, starts))
    node_of_group = np.empty(len(first_seen), np.int64)
    node_of_group[order] = np.arange(len(first_seen))
    example = first_seen[order]
    node = node_of_group[group]
    longest, busy_ns, duration_ns = _node_times(profile, node, len(example))
    return EventGroups(
        node=node.astype(np.int32),
        role=role[example],
        host_op=owner[example],
        answers=owners.answers[example],
        longest=longest,
        stream=profile.stream[longest] if count else np.empty(0, np.int64),
        busy_ns=busy_ns,
        duration_ns=duration_ns,
    )


def _node_times(profile: Profile, node: IntArray, count: int) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return, per node, the longest event, the sum of event times, and the time during which any event ran.

    The last two are equal if no events overlap, or if a start is unknown.
    """
    ran_ns = np.maximum(profile.duration_ns, 0.0)
    busy_ns = np.bincount(node, ran_ns, count).astype(np.float64)
    by_length = np.lexsort((profile.duration_ns, node))
    last = np.flatnonzero(np.append(np.diff(node[by_length]) > 0, True)) if count else np.empty(0, np.int64)
    order = np.lexsort((profile.start_ns, node))
    sizes = np.bincount(node, minlength=count)
    offsets = np.append(0, np.cumsum(sizes))
    duration_ns = busy_ns.copy()
    for number in np.flatnonzero(sizes > 1).tolist():
        rows = order[offsets[number] : offsets[number + 1]]
        start_ns, length_ns = profile.start_ns[rows], ran_ns[rows]
        if not np.isnan(start_ns).any():
            reached = np.maximum.accumulate(start_ns + length_ns)
            previous = np.append(-np.inf, reached[:-1])
            overlap = np.minimum(np.maximum(previous - start_ns, 0.0), length_ns)
            duration_ns[number] = float(busy_ns[number]) - float(overlap.sum())
    return by_length[last], busy_ns, duration_ns
