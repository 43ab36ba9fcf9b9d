"""Recording of the operations that PyTorch dispatches during a step, below autograd and tensor subclasses.

DTensors and asynchronous results are first replaced by their local operations. Every operation runs as it
would without the recording.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hespas.captures.torch.calls import (
    VALUE_GUESSED,
    CallArgument,
    CallCommunication,
    RankRecording,
    RecordedCall,
    TensorRecord,
    tensor_bytes,
)
from hespas.captures.torch.library import torch_module
from hespas.captures.torch.origins import OriginTracker
from hespas.captures.torch.tensors import (
    CommunicationOp,
    OpSignature,
    StorageTracker,
    convert_arguments,
    find_communication_op,
    is_ragged,
    read_signature,
    record_tensor,
    tensors_at,
    tensors_in,
    value_text,
)

__all__ = ["StepRecorder"]

_UNRECORDED = frozenset({"prim", "profiler", "inductor"})
"""Namespaces of queries and markers, which compute nothing."""
_WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})
"""Operations that return their argument, after a wait or wrapped for one."""
_READS_VALUE = "aten::_local_scalar_dense"
_OVERWRITES = frozenset(
    {"aten::copy_", "aten::zero_", "aten::fill_", "aten::uniform_", "aten::normal_", "aten::random_"}
)
"""Operations that do not read the tensors that they write."""
_WRITES = {"fsdp::all_gather_copy_in": "all_gather_output"}
"""Arguments that are written although the schema does not declare it."""


class StepRecorder:
    """Records into :attr:`record` the operations that are dispatched inside :meth:`recording`."""

    def __init__(self, rank: int, num_ranks: int, *, compiled: bool = False) -> None:
        """Prepare a recording. ``compiled``: let ``torch.compile`` work, and record the calls of
        its graphs.
        """
        self.record = RankRecording(rank, num_ranks)
        self._torch = torch_module()
        self._distributed = torch_module("torch.distributed")
        self._storages = StorageTracker()
        self._origins = OriginTracker()
        self._signatures: dict[Any, OpSignature] = {}
        self._fake = torch_module("torch._subclasses.fake_tensor").FakeTensor
        library = self._torch
        self._plain = frozenset((library.Tensor, library.nn.Parameter, library.nn.Buffer, self._fake))

        def dispatch(
            _: object, function: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
        ) -> Any:
            return self._dispatch(function, types, args, kwargs or {})

        base = torch_module("torch.utils._python_dispatch").TorchDispatchMode
        methods = {
            "__torch_dispatch__": dispatch,
            "ignore_compile_internals": staticmethod(lambda: compiled),
        }
        self._mode: Any = type("CaptureMode", (base,), methods)

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the operations dispatched inside the block."""
        with self._storages.tracking(self._torch), self._origins.tracking(), self._mode():
            yield
        self.record.state_bytes = self._storages.state_bytes
        self.record.peak_bytes = self._storages.peak_bytes
        self.record.kept_bytes = self._storages.live_bytes
        # Groups in order of creation, which is the same on all ranks.
        order = list(self._distributed.distributed_c10d._world.pg_names.values())
        groups = self.record.groups
        self.record.groups = {name: groups[name] for name in [*order, *groups] if name in groups}

    def _dispatch(self, function: Any, types: Sequence[Any], args: Any, kwargs: Any) -> Any:
        if any(tensor_type not in self._plain for tensor_type in types):
            return NotImplemented
        name = function._schema.name
        if name.partition("::")[0] in _UNRECORDED:
            return function(*args, **kwargs)
        signature = self._signatures.get(function)
        if signature is None:
            signature = self._signatures[function] = read_signature(function._schema)
        storage_number = self._storages.number
        arguments = convert_arguments(signature, args, kwargs, storage_number)
        # Optimizers count their steps in tensors and read the counts, which do not affect the program.
        if name == _READS_VALUE and isinstance(args[0], self._fake) and not self._origins.in_optimizer:
            message = (
                "values that the program reads from tensors without data (.item()) are assumed to be 1: "
                "loops and "
                "branches that depend on them, such as the end of decoding, end by this guess"
            )
            self.record.note(VALUE_GUESSED, message)
        result = function(*args, **kwargs)
        made = tensors_in(result)
        if name in _WAITS:
            self._storages.alias(made, tensors_in(args))
            return result
        fresh = self._storages.new_storages(made)
        results = tuple(record_tensor(tensor, storage_number) for tensor in made)
        communication_op = find_communication_op(name)
        communication = None
        if communication_op is not None:
            given = dict(zip(signature.names, args, strict=False)) | dict(kwargs)
            communication = self._communication(communication_op, given, arguments, results)
        reads, writes = _accesses(name, signature, arguments, fresh, communication_op)
        origin = self._origins.current()
        self.record.calls.append(
            RecordedCall(
                op=name,
                overload=function._schema.overload_name or "default",
                arguments=arguments,
                results=results,
                reads=reads,
                writes=writes,
                fresh=fresh,
                is_view=signature.is_view and not signature.written,
                module=origin.module,
                phase=origin.phase,
                source=origin.source,
                communication=communication,
            )
        )
        return result

    def _communication(
        self,
        op: CommunicationOp,
        given: Mapping[str, Any],
        arguments: tuple[CallArgument, ...],
        results: tuple[TensorRecord, ...],
    ) -> CallCommunication:
        group = given.get("process_group", given.get("group_name"))
        if isinstance(group, str):
            group = torch_module("torch.distributed.distributed_c10d")._resolve_process_group(group)
        elif not isinstance(group, self._distributed.ProcessGroup):
            group = self._distributed.ProcessGroup.unbox(group)
        ranks = self.record.groups.setdefault(group.group_name, ())
        if not ranks:
            ranks = tuple(self._distributed.get_process_group_ranks(group))
            self.record.groups[group.group_name] = ranks
        filled = tensors_at(arguments, op.filled) if op.filled >= 0 else results
        peer = _integer_at(arguments, op.peer)
        return CallCommunication(
            library_name=op.library_name,
            group=group.group_name,
            operand_bytes=tensor_bytes(tensors_at(arguments, op.sent)),
            result_bytes=tensor_bytes(filled) if op.library_name != "send" else float("nan"),
            peer=ranks[peer] if 0 <= peer < len(ranks) else -1,
            tag=_integer_at(arguments, op.tag),
            reduction=value_text(given.get("reduce_op", "")),
            ragged=is_ragged(arguments, op),
        )


def _integer_at(arguments: tuple[CallArgument, ...], position: int) -> int:
    """Return the integer of one argument; -1 if it is absent or not a non-negative integer."""
    text = arguments[position] if 0 <= position < len(arguments) else ""
    return int(text) if isinstance(text, str) and text.isdecimal() else -1


def _accesses(
    name: str,
    signature: OpSignature,
    arguments: tuple[CallArgument, ...],
    fresh: tuple[int, ...],
    communication_op: CommunicationOp | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the storages that a call reads, and those that it writes."""
    if communication_op is not None:
        read = tensors_at(arguments, communication_op.sent)
        filled = tensors_at(arguments, communication_op.filled)
    else:
        read, filled = (), ()
        for position, argument in enumerate(signature.names):
            is_written = position in signature.written or _WRITES.get(name) == argument
            if is_written:
                filled += tensors_at(arguments, position)
            if not is_written or not (name in _OVERWRITES or name in _WRITES or argument == "out"):
                read += tensors_at(arguments, position)
    reads = dict.fromkeys(tensor.storage for tensor in read if tensor.storage >= 0)
    writes = dict.fromkeys(tensor.storage for tensor in filled if tensor.storage >= 0)
    return tuple(reads), tuple(writes | dict.fromkeys(storage for storage in fresh if storage >= 0))
