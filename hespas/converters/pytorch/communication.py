"""What an operation of the host says of the communication it starts: kind, sizes, group, peer, tag.

Two forms: dispatcher operations (``c10d::allreduce_``), whose arguments tell, and ``record_param_comms`` of
NCCL-like libraries, which states the collective by name, as attributes since schema 1.1.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

from hespas.converters.pytorch.et_records import COMMUNICATION_RECORD, EtNode, Values, is_list
from hespas.converters.pytorch.groups import Members
from hespas.converters.pytorch.names import C10D, C10dOp, Named, named
from hespas.converters.pytorch.tensors import Tensor, argument, tensors_of
from hespas.graph import CollectiveKind, DType, NodeKind, find_dtype

__all__ = ["Communication", "communication_of", "merged", "payload_bytes"]

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
    return _dispatched(node, known) if known else None


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(tensor.bytes for tensor in tensors)) if tensors else nan


def _number(values: list[Any], place: int) -> int:
    value = values[place] if 0 <= place < len(values) else None
    return value if type(value) is int and -1 <= value < 1 << 31 else -1


def _differ(value: object) -> bool:
    return is_list(value) and len(set(map(str, value))) > 1


def _dispatched(node: EtNode, known: C10dOp) -> Communication:
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
        ragged=any(_differ(values[place]) for place in known.splits if place < len(values)),
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
    head = (
        Values(values[:place], node.inputs.shapes[:place], node.inputs.types[:place])
        if place >= 0
        else node.inputs
    )
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
