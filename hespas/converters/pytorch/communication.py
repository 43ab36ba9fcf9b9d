"""Communication of host operations: kind, sizes, process group, peer and tag.

Operations have two forms. Dispatcher operations (``c10d::allreduce_``) describe themselves by their
arguments. ``record_param_comms`` of NCCL-like libraries states the collective by name, and as attributes
since schema 1.1.0. Spellings follow ``torch/csrc/distributed/c10d`` (``Ops.cpp``, ``ParamCommsUtils``) and
the kernel names of NCCL and RCCL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isnan, nan, prod
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hespas.converters.pytorch.et_records import (
    COMMUNICATION_RECORD,
    EtNode,
    EtTensor,
    EtValues,
    argument,
    is_list,
    tensors_of,
)
from hespas.converters.pytorch.events import KinetoTrace
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
    "CommunicationKind",
    "JobGroups",
    "ListedGroup",
    "Members",
    "TraceCommunication",
    "communication_of",
    "is_communication_kernel",
    "kernel_operation",
    "kind_of_word",
    "listed_groups",
    "merged",
    "payload_bytes",
    "recorded_communication",
    "states_communication",
]


class CommunicationKind(NamedTuple):
    """Kind of a communication: a collective of some kind, a send, or a receive."""

    node: NodeKind
    collective: CollectiveKind = CollectiveKind.UNKNOWN


_COLLECTIVE_WORDS: dict[CollectiveKind, str] = {
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
_KIND_OF_WORD: MappingProxyType[str, CommunicationKind] = MappingProxyType(
    {
        word: CommunicationKind(NodeKind.COLLECTIVE, kind)
        for kind, words in _COLLECTIVE_WORDS.items()
        for word in words.split()
    }
    | {"send": CommunicationKind(NodeKind.SEND)}
    | dict.fromkeys(("recv", "recvanysource"), CommunicationKind(NodeKind.RECV))
)
UNKNOWN = CommunicationKind(NodeKind.COLLECTIVE, CollectiveKind.UNKNOWN)
"""A communication of unknown kind."""


def kind_of_word(word: str) -> CommunicationKind | None:
    """Return the kind of communication that a library's word (``allreduce``) names; None for other words
    (``wait``, ``init``).
    """
    return _KIND_OF_WORD.get(_letters(word))


def _letters(word: str) -> str:
    return re.sub(r"[^a-z]", "", word.lower())


def is_communication_kernel(kernel: str) -> bool:
    """Return True if a kernel name belongs to a communication library."""
    return kernel_facts(kernel).op_class is OpClass.COLLECTIVE


def kernel_operation(kernel: str) -> CommunicationKind | None:
    """Return the kind of communication that a kernel name states; None if it states none (``Generic``) or
    several (``SendRecv``).
    """
    return kind_of_word(kernel_facts(kernel).family) if is_communication_kernel(kernel) else None


class _DispatcherOp(NamedTuple):
    """Communication operation of PyTorch's dispatcher, with the positions of its arguments (-1: none).
    ``output`` and ``input`` are tensors; they are equal for an in-place operation. ``splits`` is the first of
    the two lists of split sizes.
    """

    kind: CommunicationKind
    output: int = -1
    input: int = -1
    peer: int = -1
    tag: int = -1
    splits: int = -1


def _dispatcher_ops(names: str, *places: int, **others: int) -> dict[str, _DispatcherOp]:
    """Return descriptions of several PyTorch operations with the same argument positions, by full name.
    ``names`` are the names without ``c10d::``, separated by spaces; each name determines the kind of
    communication.
    """
    return {
        f"c10d::{name}": _DispatcherOp(_KIND_OF_WORD[_letters(name)], *places, **others)
        for name in names.split()
    }


C10D: MappingProxyType[str, _DispatcherOp] = MappingProxyType(
    _dispatcher_ops("allreduce_ allreduce_coalesced_ broadcast_ reduce_", 0, 0)
    | _dispatcher_ops(
        "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_", 0, 1
    )
    | _dispatcher_ops("reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_", 0, 1)
    | _dispatcher_ops("gather_ scatter_ alltoall_", 0, 1)
    | _dispatcher_ops("alltoall_base_", 0, 1, splits=3)
    | _dispatcher_ops("barrier monitored_barrier_")
    | _dispatcher_ops("send", -1, 0, peer=2, tag=3)
    | _dispatcher_ops("recv_", 0, -1, peer=2, tag=3)
    | _dispatcher_ops("recv_any_source_", 0, -1, tag=2)
)
"""Communication operations of the dispatcher, with the positions of their arguments."""

_COLLECTIVE_OP = re.compile(
    r"(?:\w{0,40}_)?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
    r"(?:_into_tensor|_tensor|_single|_vdev\w{0,6})?(?:_coalesced)?(?:_fusion)?(?:_out|_copy)?_?"
)
"""Names of library operations that only communicate."""
_FRAMEWORK_NAMESPACES = ("aten", "prims", "inductor", "c10d")


def states_communication(name: str) -> bool:
    """Return True if the name of a library operation names a collective.

    Examples are operations of symmetric memory (``symm_mem::multimem_all_reduce_``), of vLLM
    (``_C_custom_ar::all_reduce``) and functional ones (``_c10d_functional::all_gather_into_tensor``).
    """
    space, _, word = name.rpartition("::")
    return bool(space) and space not in _FRAMEWORK_NAMESPACES and _COLLECTIVE_OP.fullmatch(word) is not None


def _of_library(node: EtNode) -> TraceCommunication | None:
    """Return the communication of a library operation.

    The operand is the first tensor, or the second one if the first is a buffer into which the operation
    copies. The result is the last tensor of an ``_out`` operation, else the operand itself.
    """
    word = node.name.rpartition("::")[2]
    match = _COLLECTIVE_OP.fullmatch(word)
    kind = kind_of_word(match[1]) if match else None
    if kind is None:
        return None
    arguments = [argument(node.inputs, index) for index in range(len(node.inputs.values))]
    tensors = [tensors for tensors in arguments if tensors]
    first = 1 if word.endswith("_copy") and len(tensors) > 1 else 0
    operands = tensors[first] if tensors else []
    has_result = word.endswith("_out") and len(tensors) > 1
    results = tensors[-1] if has_result else operands if kind.collective in _SAME_SIZE_RESULT else []
    names = [value for value in node.inputs.values if type(value) in (str, int) and value not in _REDUCTIONS]
    return TraceCommunication(
        kind=kind,
        operand_bytes=_bytes(operands),
        result_bytes=_bytes(results),
        group=str(names[-1]) if names and "symm_mem::" in node.name else "",
    )


_REDUCTIONS = ("", "sum", "avg", "min", "max", "prod", "product")
_SAME_SIZE_RESULT = frozenset({CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL})
"""Collectives whose result has the size of their operand."""


GROUPS_NODE = "## process_group:init ##"


Members = tuple[int, ...] | range
"""Global ranks in ring order. A range avoids listing up to a million ranks."""


class ListedGroup(msgspec.Struct, frozen=True, gc=False):
    """Process group in the list of a trace. Empty ``ranks`` means all ranks."""

    name: str = msgspec.field(default="", name="pg_name")
    ranks: msgspec.Raw = msgspec.Raw(b"")
    group_size: int = -1
    pg_size: int = -1

    @property
    def size(self) -> int:
        """Number of members, -1 if not stated."""
        return max(self.group_size, self.pg_size)

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks in ring order; empty if the list is missing or truncated."""
        try:
            ranks = msgspec.json.decode(self.ranks, type=list[int])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ()
        is_valid = len(ranks) <= _MAX_RANKS and all(0 <= rank < 1 << 31 for rank in ranks)
        return tuple(ranks) if is_valid else ()


_GROUP_LIST = msgspec.json.Decoder(list[ListedGroup])
_ANY_LIST = msgspec.json.Decoder(list[Any])


def listed_groups(document: bytes | str) -> tuple[ListedGroup, ...]:
    """Return the groups of a JSON list, none if the text is not such a list."""
    try:
        return tuple(_GROUP_LIST.decode(document))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


class JobGroups(NamedTuple):
    """Process groups of a job by name. ``world`` is the number of ranks."""

    members: dict[str, tuple[int, ...]]
    world: int

    @classmethod
    def of(cls, groups: Iterable[ListedGroup], world: int) -> JobGroups:
        """Collect the groups that one rank lists. A job of unknown size is as large as its largest group."""
        members = {group.name: group.members for group in groups}
        sizes = [group.size for group in groups if group.size <= _MAX_RANKS]
        largest = max((max(ranks) + 1 for ranks in members.values() if ranks), default=1)
        return cls(members, max(world, largest, *sizes, 1))

    def find(self, name: str, ranks: Members, size: int) -> Members | None:
        """Return the members of a process group, None if they are unknown. An empty tuple means all ranks.
        ``ranks`` are the members that the communication states (empty: none), and ``size`` their number.

        A group that is not listed has all ranks if its size is the size of the job. A communication without a
        group name belongs to the only group, if there is exactly one.
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
        """Return the group set whose only group has these members."""
        is_world = len(members) == self.world and all(rank == index for index, rank in enumerate(members))
        if not members or is_world:
            return StridedGroups.all_ranks(self.world)
        if isinstance(members, range) and members.step == 1:
            return StridedGroups((), ((len(members), 1),), members.start)
        members = tuple(members)
        rows = np.array([members], np.int64)
        return compress_groups(rows) if len(set(members)) == len(members) else ExplicitGroups((members,))


_MAX_RANKS = 1 << 20
_SILENT = frozenset({"wait", "init", "startcoalescing", "endcoalescing", "coalesced"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCommunication:
    """One communication of one rank. Unknown bytes are NaN, unknown numbers -1, unknown texts empty.

    ``group`` is the name of the process group and ``ranks`` its members (empty: look up the name).
    ``local_peer`` is the rank of the peer within the group, and ``peer`` its global rank. ``waits`` is True
    if the host waits until the communication ends. ``ragged`` is True if the parts of an exchange differ in
    size. ``reads`` and ``writes`` are numbers of storages (memory of tensors).
    """

    kind: CommunicationKind
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
        """True if the group has neither a name, nor members, nor a size."""
        return not self.group and not self.ranks and self.group_size < 0

    def with_size(self, operand_bytes: float) -> TraceCommunication:
        """Return a copy with these operand bytes if the communication states no size itself."""
        if not (isnan(self.operand_bytes) and isnan(self.result_bytes)):
            return self
        return replace(self, operand_bytes=operand_bytes)


def communication_of(node: EtNode) -> TraceCommunication | None:
    """Return the communication that a node starts, None if it starts none."""
    if node.name == COMMUNICATION_RECORD:
        values, facts = node.inputs.values, node.facts

        def is_word(value: object) -> bool:
            return isinstance(value, str) and (
                kind_of_word(value) is not None or value.lower().replace("_", "") in _SILENT
            )

        index = next((number for number, value in enumerate(values) if is_word(value)), -1)
        word = facts.get("collective_name", "") or (values[index] if index >= 0 else "")
        kind = kind_of_word(word)
        if kind is None:
            return None
        head = node.inputs
        if index >= 0:
            head = EtValues(values[:index], head.shapes[:index], head.types[:index])
        operands, results = tensors_of(head), tensors_of(node.outputs)
        sequence = values[index - 3] if index >= 3 else -1
        group = facts.get("pg_name", "")
        pair = values[index - 2] if index >= 2 else None
        if not group and is_list(pair) and pair:
            group = str(pair[0])
        elif not group and isinstance(pair, int | str):
            group = str(pair)
        size, start, stride = (
            int(text) if (text := facts.get(key, "")).isdecimal() and len(text) < 10 else -1
            for key in ("pg_size", "global_rank_start", "global_rank_stride")
        )
        has_range = start >= 0 and stride > 0 and 0 < size <= _MAX_RANKS
        splits = [
            *values[index + 1 : index + 3],
            *(facts.get(name, "") for name in ("in_split_size", "out_split_size")),
        ]
        parts = [split.strip("[] ").split(",") if isinstance(split, str) else split for split in splits]
        dtype = find_dtype(facts.get("dtype", ""))
        return TraceCommunication(
            kind=kind,
            operand_bytes=_first_known(
                _bytes(operands), _stated_bytes(facts.get("in_msg_nelems", ""), dtype)
            ),
            result_bytes=_first_known(_bytes(results), _stated_bytes(facts.get("out_msg_nelems", ""), dtype)),
            group=group,
            ranks=range(start, start + stride * size, stride) if has_range else (),
            group_size=size,
            local_peer=_number(values, index - 1) if kind.node is not NodeKind.COLLECTIVE else -1,
            sequence=_number(sequence if is_list(sequence) else [sequence], 0),
            ragged=any(map(_differ, parts)),
            reads=tuple(tensor.storage for tensor in operands),
            writes=tuple(tensor.storage for tensor in results),
        )
    op = C10D.get(node.name)
    if op is None:
        return _of_library(node) if states_communication(node.name) else None
    values = node.inputs.values
    operands, results = argument(node.inputs, op.input), argument(node.inputs, op.output)
    names = [part.strip().split("=")[0].split(" ")[-1] for part in node.op_schema.split(") ->")[0].split(",")]
    blocks = "async_op" in names and values[names.index("async_op") : names.index("async_op") + 1] == [False]
    return TraceCommunication(
        kind=op.kind,
        operand_bytes=_bytes(operands),
        result_bytes=_bytes(results),
        local_peer=_number(values, op.peer),
        tag=_number(values, op.tag),
        waits=blocks,
        ragged=op.splits >= 0 and any(map(_differ, values[op.splits : op.splits + 2])),
        reads=tuple(tensor.storage for tensor in operands),
        writes=tuple(tensor.storage for tensor in results),
    )


def _bytes(tensors: list[EtTensor]) -> float:
    return float(sum(tensor.bytes for tensor in tensors)) if tensors else nan


def _number(values: list[Any], index: int) -> int:
    value = values[index] if 0 <= index < len(values) else None
    return value if type(value) is int and -1 <= value < 1 << 31 else -1


def _differ(value: object) -> bool:
    return is_list(value) and len(set(map(str, value))) > 1


def _first_known(*candidates: float) -> float:
    return next((value for value in candidates if not isnan(value)), nan)


def _stated_bytes(elements: str, dtype: DType | None) -> float:
    if not elements.isdecimal() or len(elements) > 18 or dtype is None:
        return nan
    return float(dtype.storage_bytes(int(elements)))


def recorded_communication(kineto: KinetoTrace, event: int) -> TraceCommunication | None:
    """Return the communication that a host operation of a profile starts, None if it starts none.

    The operation is converted to the form of an execution trace, as far as the profile has its inputs.
    """
    host, strings = kineto.host, kineto.strings
    name = strings[int(host.name_id[event])]
    dims = _decoded_list(strings[int(host.dims_id[event])])
    kinds = _decoded_list(strings[int(host.types_id[event])])
    concrete = _decoded_list(strings[int(host.concrete_id[event])])
    inputs = EtValues()
    for index in range(max(len(dims), len(concrete))):
        kind = str(kinds[index]) if index < len(kinds) else ""
        shape: object = dims[index] if index < len(dims) else []
        tensor = _tensor_fields(shape, kind)
        value = concrete[index] if index < len(concrete) else ""
        if isinstance(value, str):  # the profiler writes scalars as Python does
            digits = value.removeprefix("-")
            is_integer = digits.isdecimal() and len(digits) < 19
            value = value == "True" if value in ("True", "False") else int(value) if is_integer else value
        inputs.values.append(value if tensor is None else tensor)
        inputs.shapes.append(shape)
        inputs.types.append("" if tensor is None else f"Tensor({kind})")
    schema = "(bool async_op) ->" if name not in C10D else ""
    return communication_of(EtNode(event, name, -1, -1, 0, -1, schema, inputs, EtValues(), {}))


def _decoded_list(text: str) -> list[Any]:
    try:
        return _ANY_LIST.decode(text or "[]")
    except (msgspec.DecodeError, RecursionError):
        return []


def _tensor_fields(shape: object, kind: str) -> list[Any] | None:
    """Return the six fields in which a trace describes a tensor. Only size and element type are known. None
    for a scalar.
    """
    dtype = find_dtype(kind) if kind else None
    if dtype is None or not is_list(shape):
        return None
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        return None
    elements = prod(shape)
    return [0, 0, 0, elements, dtype.storage_bytes(1), ""] if elements < 1 << 60 else None


def merged(facts: TraceCommunication, others: TraceCommunication | None) -> TraceCommunication:
    """Return ``facts`` about a communication. Unknown values are filled in from ``others``, a second record
    of the same communication.
    """
    if others is None:
        return facts
    return replace(
        facts,
        operand_bytes=_first_known(facts.operand_bytes, others.operand_bytes),
        result_bytes=_first_known(facts.result_bytes, others.result_bytes),
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


def payload_bytes(facts: TraceCommunication, group_size: int) -> float:
    """Return the payload as Chakra defines it: the shard of a gather, else the whole buffer of the rank."""
    operand, result = facts.operand_bytes, facts.result_bytes
    size = float(group_size) if group_size > 0 else nan
    match facts.kind.node, facts.kind.collective:
        case NodeKind.RECV, _:
            return _first_known(result, operand)
        case _, CollectiveKind.ALL_GATHER | CollectiveKind.GATHER:
            return _first_known(operand, result / size)
        case _, CollectiveKind.REDUCE_SCATTER:
            return _first_known(operand, result * size)
        case _, CollectiveKind.SCATTER:
            return _first_known(result * size, operand)
        case _:
            return _first_known(operand, result)
