"""What an operation of the host says of the communication it starts: kind, sizes, group, peer, tag.

Two forms: dispatcher operations (``c10d::allreduce_``), whose arguments tell, and ``record_param_comms`` of
NCCL-like libraries, which states the collective by name, as attributes since schema 1.1.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan, nan
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hespas.converters.pytorch.et_records import (
    COMMUNICATION_RECORD,
    EtNode,
    Tensor,
    Values,
    argument,
    is_list,
    tensors_of,
)
from hespas.costs.kernels import kernel_facts
from hespas.graph import (
    CollectiveKind,
    DType,
    ExplicitGroups,
    GroupSet,
    NodeKind,
    OpClass,
    StridedGroups,
    compress_groups,
    find_dtype,
)

__all__ = [
    "C10D",
    "GROUPS_NODE",
    "UNKNOWN",
    "Communication",
    "Groups",
    "Members",
    "Named",
    "ProcessGroup",
    "communication_of",
    "is_communication_kernel",
    "kernel_operation",
    "listed_groups",
    "merged",
    "named",
    "payload_bytes",
    "states_communication",
]

# What libraries call their collectives and messages, and what that is to us: one table for all spellings.
#
# Sources: ``torch/csrc/distributed/c10d`` (``Ops.cpp``, ``ParamCommsUtils``), NCCL and RCCL kernel names.


class Named(NamedTuple):
    """A kind of communication: a collective's, or the direction of a message."""

    node: NodeKind
    collective: CollectiveKind = CollectiveKind.UNKNOWN


_WORDS: dict[CollectiveKind, str] = {
    CollectiveKind.ALL_REDUCE: "allreduce allreducecoalesced allreducesparse",
    CollectiveKind.ALL_GATHER: "allgather allgatherv allgatherbase allgathercoalesced allgatherintotensor"
    " allgatherintotensorcoalesced",
    CollectiveKind.REDUCE_SCATTER: "reducescatter reducescatterv reducescatterbase reducescattertensor"
    " reducescattertensorcoalesced",
    CollectiveKind.ALL_TO_ALL: "alltoall alltoallv alltoallbase alltoallsingle",
    CollectiveKind.BROADCAST: "broadcast broadcastoop",
    CollectiveKind.REDUCE: "reduce reduceoop",
    CollectiveKind.GATHER: "gather",
    CollectiveKind.SCATTER: "scatter",
    CollectiveKind.BARRIER: "barrier monitoredbarrier",
}
_NAMES: MappingProxyType[str, Named] = MappingProxyType(
    {word: Named(NodeKind.COLLECTIVE, kind) for kind, words in _WORDS.items() for word in words.split()}
    | {"send": Named(NodeKind.SEND)}
    | dict.fromkeys(("recv", "recvanysource"), Named(NodeKind.RECV))
)
UNKNOWN = Named(NodeKind.COLLECTIVE, CollectiveKind.UNKNOWN)
"""A communication of unknown kind."""


def named(spelling: str) -> Named | None:
    """What a library's word for a communication means; None for other words (``wait``, ``init``)."""
    return _NAMES.get(_letters(spelling))


def _letters(spelling: str) -> str:
    return re.sub(r"[^a-z]", "", spelling.lower())


def is_communication_kernel(kernel: str) -> bool:
    """Return True if the name of a kernel is that of a communication library's."""
    return kernel_facts(kernel).op_class is OpClass.COLLECTIVE


def kernel_operation(kernel: str) -> Named | None:
    """The operation in a kernel's name; None where it holds none (``Generic``) or several (``SendRecv``)."""
    return named(kernel_facts(kernel).family) if is_communication_kernel(kernel) else None


class _C10dOp(NamedTuple):
    """The arguments of a dispatcher operation by place (-1: none): where tensors, peer and tag are, and the
    first of the two lists of splits.

    ``output`` and ``input`` are the same place where the operation works in place.
    """

    meaning: Named
    output: int = -1
    input: int = -1
    peer: int = -1
    tag: int = -1
    splits: int = -1


def _c10d(names: str, *places: int, **others: int) -> dict[str, _C10dOp]:
    """Operations whose arguments stand in the same places; their names say what they mean."""
    return {f"c10d::{name}": _C10dOp(_NAMES[_letters(name)], *places, **others) for name in names.split()}


C10D: MappingProxyType[str, _C10dOp] = MappingProxyType(
    _c10d("allreduce_ allreduce_coalesced_ broadcast_ reduce_", 0, 0)
    | _c10d("allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_", 0, 1)
    | _c10d("reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_", 0, 1)
    | _c10d("gather_ scatter_ alltoall_", 0, 1)
    | _c10d("alltoall_base_", 0, 1, splits=3)
    | _c10d("barrier monitored_barrier_")
    | _c10d("send", -1, 0, peer=2, tag=3)
    | _c10d("recv_", 0, -1, peer=2, tag=3)
    | _c10d("recv_any_source_", 0, -1, tag=2)
)
"""The dispatcher's communication operations, with the places of their arguments."""

_COLLECTIVE_WORD = re.compile(
    r"(?:\w{0,40}_)?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
    r"(?:_into_tensor|_tensor|_single|_vdev\w{0,6})?(?:_coalesced)?(?:_fusion)?(?:_out|_copy)?_?"
)
"""Names of library operations that only communicate."""
_NOT_OF_LIBRARIES = ("aten", "prims", "inductor", "c10d")


def states_communication(name: str) -> bool:
    """Return True for an operation of a library whose name is a collective's.

    Such are operations of symmetric memory (``symm_mem::multimem_all_reduce_``), of vLLM
    (``_C_custom_ar::all_reduce``) and functional ones (``_c10d_functional::all_gather_into_tensor``).
    """
    space, _, word = name.rpartition("::")
    return bool(space) and space not in _NOT_OF_LIBRARIES and _COLLECTIVE_WORD.fullmatch(word) is not None


def _of_library(node: EtNode) -> Communication | None:
    """Communication of an operation of a library: of its first tensor (the second, behind a buffer that it
    copies into), in place or into the last tensor of an ``_out`` operation.
    """
    word = node.name.rpartition("::")[2]
    found = _COLLECTIVE_WORD.fullmatch(word)
    meaning = named(found[1]) if found else None
    if meaning is None:
        return None
    listed = [argument(node.inputs, place) for place in range(len(node.inputs.values))]
    tensors = [each for each in listed if each]
    place = 1 if word.endswith("_copy") and len(tensors) > 1 else 0
    operands = tensors[place] if tensors else []
    has_result = word.endswith("_out") and len(tensors) > 1
    results = tensors[-1] if has_result else operands if meaning.collective in _AS_LARGE else []
    names = [value for value in node.inputs.values if type(value) in (str, int) and value not in _REDUCTIONS]
    return Communication(
        meaning=meaning,
        operand_bytes=_bytes(operands),
        result_bytes=_bytes(results),
        group=str(names[-1]) if names and "symm_mem::" in node.name else "",
    )


_REDUCTIONS = ("", "sum", "avg", "min", "max", "prod", "product")
_AS_LARGE = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL})
"""Collectives whose result has the size of their operand."""


# Process groups: from the node that lists them, or from what the profiler says of the run.

GROUPS_NODE = "## process_group:init ##"


Members = tuple[int, ...] | range
"""Global ranks in ring order; what a step says is not written out, as a few bytes may stand for a million."""


class ProcessGroup(msgspec.Struct, frozen=True, gc=False):
    """One group as listed; an empty ``ranks`` means all ranks."""

    name: str = msgspec.field(default="", name="pg_name")
    ranks: msgspec.Raw = msgspec.Raw(b"")
    group_size: int = -1
    pg_size: int = -1

    @property
    def size(self) -> int:
        """Number of members, -1 where not stated."""
        return max(self.group_size, self.pg_size)

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks in ring order; none where the list is not there or cut."""
        try:
            found = msgspec.json.decode(self.ranks, type=list[int])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ()
        good = len(found) <= _MOST_RANKS and all(0 <= rank < 1 << 31 for rank in found)
        return tuple(found) if good else ()


_LIST = msgspec.json.Decoder(list[ProcessGroup])


def listed_groups(document: bytes | str) -> tuple[ProcessGroup, ...]:
    """The groups of a JSON list; none where it is no such list."""
    try:
        return tuple(_LIST.decode(document))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


def _is_everybody(members: Members, world: int) -> bool:
    """Whether these are all ranks in order; a job may be said to be larger than memory."""
    return len(members) == world and all(rank == place for place, rank in enumerate(members))


class Groups(NamedTuple):
    """The groups of a job by name. ``world`` is the number of ranks."""

    members: dict[str, tuple[int, ...]]
    world: int

    @classmethod
    def of(cls, groups: Iterable[ProcessGroup], world: int) -> Groups:
        """Groups of one rank; the size of the job where nobody states it is that of the largest group."""
        found = {group.name: group.members for group in groups}
        stated = [group.size for group in groups if group.size <= _MOST_RANKS]
        largest = max((max(ranks) + 1 for ranks in found.values() if ranks), default=1)
        return cls(found, max(world, largest, *stated, 1))

    def find(self, name: str, ranks: Members, size: int) -> Members | None:
        """The members of a group; None where nobody says. An empty list is all ranks.

        A name that no list holds is all ranks where its size says so; a communication without a name belongs
        to the only group there is.
        """
        if ranks:
            return ranks
        if name in self.members:
            return self.members[name]
        if size == self.world:
            return ()
        if not name and len(self.members) == 1:
            return next(iter(self.members.values()))
        return None

    def group_set(self, members: Members) -> GroupSet:
        """The group set that has this group only."""
        if not members or _is_everybody(members, self.world):
            return StridedGroups.all_ranks(self.world)
        if isinstance(members, range) and members.step == 1:
            return StridedGroups((), ((len(members), 1),), members.start)
        members = tuple(members)
        rows = np.array([members], np.int64)
        return compress_groups(rows) if len(set(members)) == len(members) else ExplicitGroups((members,))


_MOST_RANKS = 1 << 20
_SILENT = frozenset({"wait", "init", "startcoalescing", "endcoalescing", "coalesced"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One communication of one rank. Bytes are NaN, numbers -1, and texts empty where nobody says.

    ``group`` is the name of the process group, ``ranks`` its members (empty: look the name up).
    ``local_peer`` counts within the group, ``peer`` over all ranks.
    ``waits``: the host waits for the end. ``ragged``: parts
    of an exchange differ in size. ``reads`` and ``writes`` are storages.
    """

    meaning: Named
    operand_bytes: float = nan
    result_bytes: float = nan
    group: str = ""
    ranks: Members = ()
    group_size: int = -1
    local_peer: int = -1
    peer: int = -1
    tag: int = -1
    sequence: int = -1
    waits: bool = False
    ragged: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    @property
    def is_anonymous(self) -> bool:
        """Whether nothing is stated of the group."""
        return not self.group and not self.ranks and self.group_size < 0

    def with_size(self, operand_bytes: float) -> Communication:
        """The same with the bytes of its operands, where it states no size itself."""
        if not (isnan(self.operand_bytes) and isnan(self.result_bytes)):
            return self
        return replace(self, operand_bytes=operand_bytes)


def communication_of(node: EtNode) -> Communication | None:
    """The communication that a node starts; None where it starts none."""
    if node.name == COMMUNICATION_RECORD:
        return _recorded(node)
    known = C10D.get(node.name)
    if known:
        return _dispatched(node, known)
    return _of_library(node) if states_communication(node.name) else None


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(tensor.bytes for tensor in tensors)) if tensors else nan


def _number(values: list[Any], place: int) -> int:
    value = values[place] if 0 <= place < len(values) else None
    return value if type(value) is int and -1 <= value < 1 << 31 else -1


def _differ(value: object) -> bool:
    return is_list(value) and len(set(map(str, value))) > 1


def _dispatched(node: EtNode, known: _C10dOp) -> Communication:
    values = node.inputs.values
    operands, results = argument(node.inputs, known.input), argument(node.inputs, known.output)
    names = [part.strip().split("=")[0].split(" ")[-1] for part in node.op_schema.split(") ->")[0].split(",")]
    blocks = "async_op" in names and values[names.index("async_op") : names.index("async_op") + 1] == [False]
    return Communication(
        meaning=known.meaning,
        operand_bytes=_bytes(operands),
        result_bytes=_bytes(results),
        local_peer=_number(values, known.peer),
        tag=_number(values, known.tag),
        waits=blocks,
        ragged=known.splits >= 0 and any(map(_differ, values[known.splits : known.splits + 2])),
        reads=tuple(tensor.storage for tensor in operands),
        writes=tuple(tensor.storage for tensor in results),
    )


def _recorded(node: EtNode) -> Communication | None:
    values, facts = node.inputs.values, node.facts
    place = next((at for at, value in enumerate(values) if type(value) is str and _is_word(value)), -1)
    word = facts.get("collective_name", "") or (values[place] if place >= 0 else "")
    meaning = named(word)
    if meaning is None:
        return None
    head = node.inputs
    if place >= 0:
        head = Values(values[:place], head.shapes[:place], head.types[:place])
    operands, results = tensors_of(head), tensors_of(node.outputs)
    number = values[place - 3] if place >= 3 else -1
    group, ranks, size = _group(values[place - 2] if place >= 2 else None, dict(facts))
    splits = [
        *values[place + 1 : place + 3],
        *(facts.get(name, "") for name in ("in_split_size", "out_split_size")),
    ]
    element = find_dtype(facts.get("dtype", ""))
    return Communication(
        meaning=meaning,
        operand_bytes=_first(_bytes(operands), _stated(facts.get("in_msg_nelems", ""), element)),
        result_bytes=_first(_bytes(results), _stated(facts.get("out_msg_nelems", ""), element)),
        group=group,
        ranks=ranks,
        group_size=size,
        local_peer=_number(values, place - 1) if meaning.node is not NodeKind.COLLECTIVE else -1,
        sequence=_number(number if is_list(number) else [number], 0),
        ragged=any(_differ(_split(part)) for part in splits),
        reads=tuple(tensor.storage for tensor in operands),
        writes=tuple(tensor.storage for tensor in results),
    )


def _is_word(value: str) -> bool:
    return named(value) is not None or value.lower().replace("_", "") in _SILENT


def _split(value: object) -> object:
    return value.strip("[] ").split(",") if isinstance(value, str) else value


def _first(*candidates: float) -> float:
    return next((value for value in candidates if not isnan(value)), nan)


def _stated(elements: str, element: DType | None) -> float:
    if not elements.isdecimal() or len(elements) > 18 or element is None:
        return nan
    return float(element.storage_bytes(int(elements)))


def _group(value: object, facts: dict[str, str]) -> tuple[str, Members, int]:
    """Name, members and size of a process group, as far as stated."""
    name = facts.get("pg_name", "")
    if not name and is_list(value) and value:
        name = str(value[0])
    elif not name and isinstance(value, int | str):
        name = str(value)
    size, start, stride = (
        int(text) if (text := facts.get(key, "")).isdecimal() and len(text) < 10 else -1
        for key in ("pg_size", "global_rank_start", "global_rank_stride")
    )
    listed = start >= 0 and stride > 0 and 0 < size <= _MOST_RANKS
    return name, range(start, start + stride * size, stride) if listed else (), size


def merged(facts: Communication, others: Communication | None) -> Communication:
    """``facts`` with what only ``others`` say of the same communication."""
    if others is None:
        return facts
    return replace(
        facts,
        operand_bytes=_first(facts.operand_bytes, others.operand_bytes),
        result_bytes=_first(facts.result_bytes, others.result_bytes),
        group=facts.group or others.group,
        ranks=facts.ranks or others.ranks,
        group_size=max(facts.group_size, others.group_size),
        local_peer=facts.local_peer if facts.local_peer >= 0 else others.local_peer,
        peer=facts.peer if facts.peer >= 0 else others.peer,
        tag=facts.tag if facts.tag >= 0 else others.tag,
        sequence=facts.sequence if facts.sequence >= 0 else others.sequence,
        waits=facts.waits or others.waits,
        ragged=facts.ragged or others.ragged,
        reads=facts.reads or others.reads,
        writes=facts.writes or others.writes,
    )


def payload_bytes(facts: Communication, group_size: int) -> float:
    """The payload in Chakra's sense: the shard of a gather, else the whole buffer of the rank."""
    operand, result = facts.operand_bytes, facts.result_bytes
    size = float(group_size) if group_size > 0 else nan
    match facts.meaning.node, facts.meaning.collective:
        case NodeKind.RECV, _:
            return _first(result, operand)
        case _, CollectiveKind.ALL_GATHER | CollectiveKind.GATHER:
            return _first(operand, result / size)
        case _, CollectiveKind.REDUCE_SCATTER:
            return _first(operand, result * size)
        case _, CollectiveKind.SCATTER:
            return _first(result * size, operand)
        case _:
            return _first(operand, result)
