"""Conversion of the tensors and arguments of dispatched operations to plain values, and numbering of their
storages.

Values are written as PyTorch's profiler writes them. Communication operations are of two families: ``c10d``
takes a process group and fills tensors, ``_c10d_functional`` (DTensor, compiled graphs) names a group and
makes new tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from hespas.captures.torch.calls import CallArgument, TensorRecord
from hespas.captures.torch.library import torch_module
from hespas.converters.pytorch.communication import C10D

__all__ = [
    "CommunicationOp",
    "OpSignature",
    "StorageTracker",
    "convert_arguments",
    "find_communication_op",
    "is_ragged",
    "read_signature",
    "record_tensor",
    "tensors_at",
    "tensors_in",
    "value_text",
]

_SCALAR_NAMES = """
    uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128 bool bfloat16
    float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64
"""
_SCALAR_CODES: dict[str, int] = dict(
    zip(_SCALAR_NAMES.split(), (*range(8), 9, 10, 11, 15, *range(23, 30)), strict=True)
)
"""``c10::ScalarType``: codes of element types as values."""

_StorageNumber = Callable[[Any], int]
"""Function from a tensor to the number of its storage."""


class OpSignature(NamedTuple):
    """Signature of an operation from its schema: argument names, defaults, and the indices of the arguments
    that the operation writes.

    ``is_view`` is True if a result shares memory with an argument that is not written.
    """

    names: tuple[str, ...]
    defaults: tuple[object, ...]
    written: frozenset[int]
    is_view: bool


def read_signature(schema: Any) -> OpSignature:
    """Return the argument names, defaults and written arguments from the schema of a PyTorch operation."""
    arguments = list(schema.arguments)
    return OpSignature(
        names=tuple(argument.name for argument in arguments),
        defaults=tuple(
            argument.default_value if argument.has_default_value() else None for argument in arguments
        ),
        written=frozenset(
            position
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        is_view=any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        ),
    )


def tensors_in(value: object) -> list[Any]:
    """Return all tensors in nested lists, tuples and mappings, in order."""
    return list(_leaves(value, torch_module().Tensor))


def _leaves(value: object, tensor_type: Any) -> Iterator[Any]:
    if isinstance(value, tensor_type):
        yield value
    elif isinstance(value, dict):
        yield from _leaves(list(cast("dict[str, object]", value).values()), tensor_type)
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _leaves(item, tensor_type)


def record_tensor(tensor: Any, storage_number: _StorageNumber) -> TensorRecord:
    """Return a tensor's type, shape, strides and storage number as plain values."""
    is_strided = str(tensor.layout) == "torch.strided"
    strides = tuple(map(int, tensor.stride())) if is_strided else ()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRecord(dtype, tuple(map(int, tensor.shape)), strides, storage_number(tensor))


def convert_arguments(
    signature: OpSignature,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    storage_number: _StorageNumber,
) -> tuple[CallArgument, ...]:
    """Return the arguments of a call as plain values, one entry for each argument of the schema. Absent
    arguments get their defaults.
    """
    tensor_type = torch_module().Tensor

    def convert(value: Any) -> CallArgument:
        if isinstance(value, tensor_type):
            return record_tensor(value, storage_number)
        tensors = tensors_in(cast("list[Any]", value)) if isinstance(value, list | tuple) else []
        if tensors:
            return tuple(record_tensor(tensor, storage_number) for tensor in tensors)
        return value_text(value)

    values = [
        args[position] if position < len(args) else kwargs.get(name, default)
        for position, (name, default) in enumerate(zip(signature.names, signature.defaults, strict=True))
    ]
    return tuple(map(convert, values))


def value_text(value: Any) -> str:
    """Return a value as text in the form of PyTorch's profiler; empty for values that the profiler does not
    write.
    """
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, list | tuple):
        entries = map(value_text, cast("list[Any]", value))
        return f"[{', '.join(entries)}]"
    code = _SCALAR_CODES.get(str(value).removeprefix("torch."))
    return "" if code is None else str(code)


class CommunicationOp(NamedTuple):
    """Positions of the arguments of a communication operation (-1: absent): the sent tensors, the filled
    tensors, the peer within the group, the tag, and the first of the two lists of split sizes.

    If ``filled`` is -1, the operation makes a new tensor. ``library_name`` is the name of the collective in
    communication libraries.
    """

    library_name: str
    sent: int
    filled: int = -1
    peer: int = -1
    tag: int = -1
    splits: int = -1


_FUNCTIONAL: dict[str, CommunicationOp] = {
    "all_reduce": CommunicationOp("allreduce", 0),
    "all_reduce_": CommunicationOp("allreduce", 0, 0),
    "all_reduce_coalesced": CommunicationOp("allreduce_coalesced", 0),
    "all_reduce_coalesced_": CommunicationOp("allreduce_coalesced", 0, 0),
    "all_gather_into_tensor": CommunicationOp("allgather_into_tensor", 0),
    "all_gather_into_tensor_coalesced": CommunicationOp("allgather_into_tensor_coalesced", 0),
    "all_gather_into_tensor_out": CommunicationOp("allgather_into_tensor", 0, 3),
    "reduce_scatter_tensor": CommunicationOp("reduce_scatter_tensor", 0),
    "reduce_scatter_tensor_coalesced": CommunicationOp("reduce_scatter_tensor_coalesced", 0),
    "reduce_scatter_tensor_out": CommunicationOp("reduce_scatter_tensor", 0, 4),
    "all_to_all_single": CommunicationOp("alltoall_base", 0, splits=1),
    "broadcast": CommunicationOp("broadcast", 0),
    "broadcast_": CommunicationOp("broadcast", 0, 0),
    "isend": CommunicationOp("send", 0, peer=1, tag=2),
    "irecv": CommunicationOp("recv", -1, 0, peer=1, tag=2),
}

_COMMUNICATION_OPS: Mapping[str, CommunicationOp] = MappingProxyType(
    {
        name: CommunicationOp(
            name.partition("::")[2].strip("_").removesuffix("_"),
            positions.input,
            positions.output,
            positions.peer,
            positions.tag,
            positions.splits,
        )
        for name, positions in C10D.items()
    }
    | {f"_c10d_functional::{name}": op for name, op in _FUNCTIONAL.items()}
    | {"_dtensor::shard_dim_alltoall": CommunicationOp("alltoall_base", 0)}
)


def find_communication_op(op: str) -> CommunicationOp | None:
    """Return the positions of tensors, peer, tag and splits among the arguments of a communication operation;
    None for other operations.
    """
    return _COMMUNICATION_OPS.get(op)


def tensors_at(arguments: tuple[CallArgument, ...], position: int) -> tuple[TensorRecord, ...]:
    """Return the tensors of one argument."""
    if not 0 <= position < len(arguments):
        return ()
    argument = arguments[position]
    if isinstance(argument, TensorRecord):
        return (argument,)
    return () if isinstance(argument, str) else argument


def is_ragged(arguments: tuple[CallArgument, ...], op: CommunicationOp) -> bool:
    """Return True if the parts of an all-to-all or similar exchange, one per rank, differ in size."""
    texts = arguments[op.splits : op.splits + 2] if op.splits >= 0 else ()
    return any(isinstance(text, str) and len(set(text.strip("[]").split(", "))) > 1 for text in texts)


class StorageTracker:
    """Tracker that numbers storages (memory of tensors) in order of first use, and counts live bytes.

    A storage that is used before an operation made it existed before the recording (state). The others are
    made by the recorded operations, and freed with their last reference. A number is never reused: memory
    that is allocated again gets a new number.
    """

    def __init__(self) -> None:
        self.state_bytes = 0
        self.live_bytes = 0
        """Bytes made by recorded operations, or changed in size since, and not freed."""
        self._max_live_bytes = 0
        self._count = 0
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._is_finished = False

    @property
    def peak_bytes(self) -> int:
        """Return the maximum of bytes alive at the same time, including parameters and optimizer states."""
        return self.state_bytes + self._max_live_bytes

    def number(self, tensor: Any) -> int:
        """Return the storage number of an operation's input. A storage that has no number yet existed before
        the step, and is counted as state.
        """
        return self._number(tensor, is_state=True)[0]

    def new_storages(self, results: Sequence[Any]) -> tuple[int, ...]:
        """Return the storage numbers of those results whose memory did not exist before."""
        numbers = [self._number(tensor, is_state=False) for tensor in results]
        return tuple(dict.fromkeys(number for number, is_new in numbers if is_new))

    def alias(self, results: Sequence[Any], sources: Sequence[Any]) -> None:
        """Assign the storage numbers of ``sources`` to the ``results`` of a call.

        A wait for communication returns its argument. On tensors without data it returns a copy, which must
        count as the same storage.
        """
        for result, source in zip(results, sources, strict=False):
            storage = result.untyped_storage()
            if storage._cdata not in self._numbers:
                self._watch(storage, self.number(source), 0)

    @contextmanager
    def tracking(self, torch: Any) -> Generator[None]:
        """Track storages that are resized inside the block. FSDP frees gathered parameters by resizing."""
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            before = int(storage.nbytes())
            result = original(storage, size)
            key = storage._cdata
            if key not in self._numbers:
                self._count += 1
                self._watch(storage, self._count - 1, before)
                self.state_bytes += before
            size_after = int(storage.nbytes())
            grown = size_after - self._sizes[key]
            self._sizes[key] = size_after
            self._grow(grown)
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original
            self._is_finished = True

    def _number(self, tensor: Any, *, is_state: bool) -> tuple[int, bool]:
        """Return the storage number of a tensor (-1 without a storage), and True if the number is new."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return -1, False
        number = self._numbers.get(storage._cdata)
        if number is not None:
            return number, False
        size = int(storage.nbytes())
        self._count += 1
        self._watch(storage, self._count - 1, size)
        if is_state:
            self.state_bytes += size
        else:
            self._grow(size)
        return self._count - 1, True

    def _watch(self, storage: Any, number: int, size: int) -> None:
        key = storage._cdata
        self._numbers[key], self._sizes[key] = number, size

        def forget(_: object) -> None:
            self._references.pop(key, None)
            self._numbers.pop(key, None)
            freed = self._sizes.pop(key, 0)
            if not self._is_finished:
                self.live_bytes -= freed

        self._references[key] = weakref.ref(storage, forget)

    def _grow(self, size: int) -> None:
        self.live_bytes += size
        self._max_live_bytes = max(self._max_live_bytes, self.live_bytes)
