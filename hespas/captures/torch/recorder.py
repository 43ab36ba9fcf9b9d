"""Recording of the operations that PyTorch dispatches during a step, below autograd and tensor subclasses.

DTensors and asynchronous results are first replaced by their local operations. Every operation runs as it
would without the recording.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from hespas.captures.torch.calls import (
    VALUE_GUESSED,
    CallArgument,
    CallCommunication,
    RankRecording,
    RecordedCall,
    StepPhase,
    TensorRecord,
    tensor_bytes,
)
from hespas.captures.torch.library import torch_module
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

__all__ = ["CallOrigin", "OriginTracker", "StepRecorder", "failing_line"]

_OWN_FOLDER = str(Path(__file__).parent)


class CallOrigin(NamedTuple):
    """Module and source line of the user's program from which a call comes, as in the fields of
    :class:`hespas.captures.torch.calls.RecordedCall`.
    """

    module: str
    phase: str
    source: str


class OriginTracker:
    """Tracker of the module and source line from which each operation comes. Backward operations have the
    origin of their forward operation.
    """

    def __init__(self) -> None:
        self.torch = torch_module()
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: list[Any] = []
        self._forward: dict[int, tuple[str, str]] = {}
        self._optimizer = ""
        self._library = str(Path(self.torch.__file__).parent)

    @contextmanager
    def tracking(self) -> Generator[None]:
        """Track calls of modules and optimizers inside the block."""
        modules = torch_module("torch.nn.modules.module")
        optimizers = torch_module("torch.optim.optimizer")

        def enter(root: Any, _: object) -> None:
            if id(root) not in self._names:
                self._roots.append(root)
                root_type = cast("Any", type(root))
                class_name = str(root_type.__name__)
                if any(base.__name__ == "FSDPModule" for base in root_type.__mro__):
                    class_name = class_name.removeprefix("FSDP")  # FSDP derives its class from the user's
                prefix = f"{self._stack[-1]}." if self._stack else ""
                for path, module in root.named_modules(prefix=f"{prefix}{class_name}"):
                    self._names.setdefault(id(module), path)
            self._stack.append(self._names[id(root)])

        def leave(*_: object) -> None:
            self._stack.pop()

        def begin_step(optimizer: Any, *_: object) -> None:
            self._optimizer = type(optimizer).__name__

        def end_step(*_: object) -> None:
            self._optimizer = ""

        hooks = [
            modules.register_module_forward_pre_hook(enter),
            modules.register_module_forward_hook(leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(begin_step),
            optimizers.register_optimizer_step_post_hook(end_step),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def in_optimizer(self) -> bool:
        """True while the step of an optimizer is running."""
        return bool(self._optimizer)

    def current(self) -> CallOrigin:
        """Return the origin of the operation that is being dispatched."""
        source = ""
        frame = inspect.currentframe()
        while frame is not None and not source:
            file = _display_name(frame.f_code.co_filename, self._library)
            source = f"{file}:{frame.f_lineno}" if file else ""
            frame = frame.f_back
        module = self._stack[-1] if self._stack else ""
        if self.torch._C._current_graph_task_id() >= 0:
            if self._stack:
                self._remember(module, source)
                return CallOrigin(module, StepPhase.RECOMPUTE, source)
            node = self.torch._C._current_autograd_node()
            forward = self._forward.get(node._sequence_nr()) if node is not None else None
            module, source = forward or ("", source)
            return CallOrigin(module, StepPhase.BACKWARD, source)
        if self._optimizer:
            return CallOrigin(self._optimizer, StepPhase.OPTIMIZER, source)
        self._remember(module, source)
        return CallOrigin(module, StepPhase.FORWARD, source)

    def _remember(self, module: str, source: str) -> None:
        """Store the origin of a forward operation under autograd's sequence number, so that its backward
        operation gets the same origin.
        """
        if self.torch.is_grad_enabled():
            self._forward.setdefault(self.torch.autograd._get_sequence_nr() - 1, (module, source))


def failing_line(error: BaseException) -> str | None:
    """Return the innermost line of the user's program that raised an error; None for errors elsewhere."""
    library = str(Path(torch_module().__file__).parent)
    line: str | None = None
    trace = error.__traceback__
    while trace is not None:
        file = _display_name(trace.tb_frame.f_code.co_filename, library)
        line = f"{file}:{trace.tb_lineno}" if file else line
        trace = trace.tb_next
    return line


@lru_cache(maxsize=4096)
def _display_name(filename: str, library: str) -> str:
    """Return the path of a user's file, relative to the working directory if possible; empty for files of
    PyTorch and other libraries.
    """
    if filename.startswith((library, _OWN_FOLDER, "<frozen", "<string>")) or "/contextlib.py" in filename:
        return ""
    path = Path(filename)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name


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
    """Recorder of the operations that PyTorch dispatches. Operations inside :meth:`recording` are appended to
    :attr:`record`.
    """

    def __init__(self, rank: int, num_ranks: int, *, compiled: bool = False) -> None:
        """Prepare the recording of a rank. ``compiled``: keep ``torch.compile`` active, and record the calls
        of its graphs.
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
                "loops and branches that depend on them, such as the end of decoding, follow this assumption"
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
        written = [*(tensor.storage for tensor in filled), *fresh]
        reads = tuple(dict.fromkeys(tensor.storage for tensor in read if tensor.storage >= 0))
        writes = tuple(dict.fromkeys(storage for storage in written if storage >= 0))
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
    """Return the argument at a position as an integer; -1 if it is absent or not a non-negative integer."""
    text = arguments[position] if 0 <= position < len(arguments) else ""
    return int(text) if isinstance(text, str) and text.isdecimal() else -1
