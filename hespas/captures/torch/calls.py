"""Recorded calls of one step of one rank, as plain values without PyTorch, and the cost of each call."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import isnan, nan, prod
from typing import NamedTuple

import msgspec

from hespas.costs.aten import VIEWS, aten_cost, find_aten_rule
from hespas.costs.operation import Cost
from hespas.graph import OpClass, find_dtype

__all__ = [
    "VALUE_GUESSED",
    "CallArgument",
    "CallCommunication",
    "RankRecording",
    "RecordedCall",
    "StepPhase",
    "TensorRecord",
    "call_cost",
    "makes_nothing",
    "tensor_bytes",
]

VALUE_GUESSED = "value-guessed"
"""Code of the finding about a value that was read from a tensor without data."""

_COPY_NAMES = """
    fsdp::all_gather_copy_in fsdp::split_with_sizes_copy fsdp::chunk_cat fsdp::copy_
    aten::split_with_sizes_copy aten::_chunk_cat aten::split_copy aten::stack aten::constant_pad_nd
    aten::flip aten::roll aten::tril aten::triu aten::select_scatter aten::slice_scatter
"""
_COPIES = frozenset(_COPY_NAMES.split())
"""Operations that copy values unchanged: read once, written once."""
_FILL_NAMES = """
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor eye
    randn randint rand randn_like rand_like randperm normal
"""
_FILLS = frozenset(f"aten::{name}" for name in _FILL_NAMES.split())
"""Operations that write values without reading any."""
_FREE = frozenset({"aten::new_empty", "aten::new_empty_strided", "aten::set_", "aten::is_pinned"})


class TensorRecord(NamedTuple):
    """Tensor that an operation reads or produces.

    ``dtype`` is PyTorch's name without ``torch.``; strides count elements. ``storage`` is the number of the
    tensor's memory, assigned in order of first use in a recording.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int


CallArgument = TensorRecord | tuple[TensorRecord, ...] | str
"""Argument in the order of the schema: a tensor, a list of tensors, or any other value as the text that
PyTorch's profiler writes (empty: None).
"""


class StepPhase:
    """Phase of a training step in which a call was recorded: forward, backward or optimizer."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward operations of a checkpoint, run again by the backward pass."""
    OPTIMIZER = "optimizer"


class CallCommunication(NamedTuple):
    """Communication that a call starts.

    ``library_name`` is the library's name (``_allgather_base_``); ``group`` names an entry of
    :attr:`RankRecording.groups`. ``peer`` is a global rank and ``tag`` the tag of the call, both -1 if
    absent. ``reduction`` is ``sum``, ``avg``, ... or empty. ``ragged``: the parts of an exchange differ in
    size.
    """

    library_name: str
    group: str
    operand_bytes: float
    result_bytes: float
    peer: int = -1
    tag: int = -1
    reduction: str = ""
    ragged: bool = False


class RecordedCall(NamedTuple):
    """Dispatched operation. ``op`` is its name with namespace (``aten::mm``), ``overload`` its variant.

    ``reads`` and ``writes`` are storage numbers; ``fresh`` are the storages that the call allocated for its
    results. ``is_view`` is True if the call computes no values. ``module`` is the path of the module
    (``GPT.blocks.0.attn``), ``source`` the line of the user's program (``train.py:31``).
    """

    op: str
    overload: str
    arguments: tuple[CallArgument, ...]
    results: tuple[TensorRecord, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    is_view: bool = False
    module: str = ""
    phase: str = StepPhase.FORWARD
    source: str = ""
    communication: CallCommunication | None = None

    @property
    def argument_tensors(self) -> list[TensorRecord]:
        """Tensors among the arguments, including those in lists."""
        tensors: list[TensorRecord] = []
        for argument in self.arguments:
            if isinstance(argument, TensorRecord):
                tensors.append(argument)
            elif not isinstance(argument, str):
                tensors.extend(argument)
        return tensors


@dataclass(slots=True)
class RankRecording:
    """Recording of one step of one rank. ``groups`` maps the name of each process group that communicates to
    its global ranks, in order of creation.

    ``state_bytes`` is the size of storages that exist before the step and are used in it: parameters,
    optimizer state and inputs. ``peak_bytes`` is the maximum of live bytes, state included; ``kept_bytes`` is
    the size of storages that the step allocated and did not free. ``notes`` are findings of the recorder:
    code -> (message, count).
    """

    rank: int
    num_ranks: int
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    state_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0
    notes: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    @property
    def guessed_values(self) -> int:
        """Number of values that the program read from tensors without data, and that were therefore
        guessed.
        """
        return self.notes.get(VALUE_GUESSED, ("", 0))[1]

    def note(self, code: str, message: str) -> None:
        """Count a finding of the recorder under its code, so that it is reported once."""
        self.notes[code] = (message, self.notes.get(code, ("", 0))[1] + 1)


def tensor_bytes(tensors: tuple[TensorRecord, ...]) -> float:
    """Return the bytes of all tensors; NaN without tensors or for an unknown type."""
    total = 0.0
    for tensor in tensors:
        dtype = find_dtype(tensor.dtype)
        total += nan if dtype is None else dtype.storage_bytes(prod(tensor.shape))
    return total if tensors else nan


def makes_nothing(call: RecordedCall) -> bool:
    """Return True if a call only makes a view or uninitialised memory. Such a call becomes no node of the
    graph.
    """
    if call.communication is not None:
        return False
    return call.is_view or call.op in VIEWS or call.op in _FREE


def call_cost(call: RecordedCall) -> Cost:
    """Return the cost of a call; NaN if the operation has no cost rule. Communication reads its operands and
    writes its results.
    """
    if call.communication is not None:
        sizes = (call.communication.operand_bytes, call.communication.result_bytes)
        read, written = (0.0 if isnan(size) else size for size in sizes)
        return Cost(OpClass.COLLECTIVE, 0.0, 0.0, 0.0, read, written)
    only_read = tuple(
        tensor
        for tensor in call.argument_tensors
        if tensor.storage in call.reads and tensor.storage not in call.writes
    )
    if call.op in _COPIES:
        copied = tensor_bytes(only_read)
        return Cost(OpClass.MOVE, 0.0, 0.0, 0.0, copied, copied)
    if call.op in _FILLS:
        return Cost(OpClass.GENERATE, 0.0, 0.0, 0.0, 0.0, tensor_bytes(call.results))
    if find_aten_rule(call.op) is None:
        return Cost(OpClass.UNKNOWN, nan, nan, nan, tensor_bytes(only_read), nan)
    shape_texts: list[object] = []
    type_texts: list[object] = []
    stride_texts: list[object] = []
    value_texts: list[str] = []
    for argument in call.arguments:
        if isinstance(argument, str):
            shape_texts.append(())
            type_texts.append("Scalar" if argument else "")
            stride_texts.append(())
            value_texts.append(argument)
            continue
        if isinstance(argument, TensorRecord):
            shape_texts.append(argument.shape)
            type_texts.append(argument.dtype)
            stride_texts.append(argument.strides)
        else:
            shape_texts.append([tensor.shape for tensor in argument])
            type_texts.append([tensor.dtype for tensor in argument])
            stride_texts.append([tensor.strides for tensor in argument])
        value_texts.append("")
    encode = msgspec.json.encode
    shapes, types, strides, values = (
        encode(shape_texts).decode(),
        encode(type_texts).decode(),
        encode(stride_texts).decode(),
        encode(value_texts).decode(),
    )
    return _rule_cost(call.op, shapes, types, strides=strides, values=values)


@lru_cache(maxsize=1 << 14)
def _rule_cost(op: str, shapes: str, types: str, *, strides: str, values: str) -> Cost:
    return aten_cost(op, shapes, types, strides=strides, values=values).cost
