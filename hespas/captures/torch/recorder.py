"""Records what PyTorch dispatches during a step, below autograd and below subclasses of tensors.

DTensors and asynchronous results first become the local operations they stand for. Each operation runs as it
would have.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hespas.captures.torch.arguments import (
    Signature,
    arguments_of,
    number_text,
    record_of,
    signature_of,
    tensors_in,
)
from hespas.captures.torch.calls import VALUE_GUESSED, Argument, Call, Recording, Talk, TensorRecord
from hespas.captures.torch.library import torch_module
from hespas.captures.torch.places import Places
from hespas.captures.torch.storages import Storages
from hespas.captures.torch.talks import Talker, bytes_of, is_ragged, talker_of, tensors_at

__all__ = ["Recorder"]

_SILENT = frozenset({"prim", "profiler", "inductor"})
"""Namespaces of questions and marks, which compute nothing."""
_WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})
"""What gives its argument back: after a wait, or wrapped for one."""
_READS_VALUE = "aten::_local_scalar_dense"
_OVERWRITES = frozenset(
    {"aten::copy_", "aten::zero_", "aten::fill_", "aten::uniform_", "aten::normal_", "aten::random_"}
)
"""Operations that do not read what they write."""
_WRITES = {"fsdp::all_gather_copy_in": "all_gather_output"}
"""Arguments that are written although the schema does not say so."""


class Recorder:
    """Records into :attr:`record` what is dispatched inside of :meth:`recording`."""

    def __init__(self, rank: int, num_ranks: int, *, compiled: bool = False) -> None:
        """``compiled``: let ``torch.compile`` work, and record what its graphs run."""
        self.record = Recording(rank, num_ranks)
        self._torch = torch_module()
        self._distributed = torch_module("torch.distributed")
        self._storages = Storages()
        self._places = Places()
        self._signatures: dict[Any, Signature] = {}
        self._fake = torch_module("torch._subclasses.fake_tensor").FakeTensor
        library = self._torch
        self._plain = frozenset((library.Tensor, library.nn.Parameter, library.nn.Buffer, self._fake))
        base = torch_module("torch.utils._python_dispatch").TorchDispatchMode
        methods = {
            "__torch_dispatch__": self._dispatched,
            "ignore_compile_internals": staticmethod(lambda: compiled),
        }
        self._mode: Any = type("CaptureMode", (base,), methods)

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record what the block dispatches."""
        with self._storages.tracking(self._torch), self._places.tracking(), self._mode():
            yield
        self.record.state_bytes = self._storages.state_bytes
        self.record.peak_bytes = self._storages.peak_bytes
        self.record.kept_bytes = self._storages.live_bytes
        self._keep_groups()

    @property
    def _dispatched(self) -> Any:
        def dispatch(
            _: object, function: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
        ) -> Any:
            return self._dispatch(function, types, args, kwargs or {})

        return dispatch

    def _dispatch(self, function: Any, types: Sequence[Any], args: Any, kwargs: Any) -> Any:
        if any(each not in self._plain for each in types):
            return NotImplemented
        name = function._schema.name
        if name.partition("::")[0] in _SILENT:
            return function(*args, **kwargs)
        signature = self._signatures.get(function)
        if signature is None:
            signature = self._signatures[function] = signature_of(function._schema)
        number = self._storages.number
        arguments = arguments_of(signature, args, kwargs, number)
        if name == _READS_VALUE and self._has_no_data(args[0]):
            message = (
                "values that the program reads from tensors without data (.item()) are taken as 1: loops and "
                "branches that depend on them, such as the end of decoding, end by this guess"
            )
            self.record.note(VALUE_GUESSED, message)
        result = function(*args, **kwargs)
        made = tensors_in(result)
        if name in _WAITS:
            self._storages.alias(made, tensors_in(args))
            return result
        fresh = self._storages.made(made)
        results = tuple(record_of(each, number) for each in made)
        talker = talker_of(name)
        given = dict(zip(signature.names, args, strict=False)) | dict(kwargs)
        talk = None if talker is None else self._talk(talker, given, arguments, results)
        reads, writes = _flow(name, signature, arguments, fresh, talker)
        place = self._places.now()
        self.record.calls.append(
            Call(
                op=name,
                overload=function._schema.overload_name or "default",
                arguments=arguments,
                results=results,
                reads=reads,
                writes=writes,
                fresh=fresh,
                is_view=signature.is_view and not signature.written,
                module=place.module,
                phase=place.phase,
                source=place.source,
                talk=talk,
            )
        )
        return result

    def _has_no_data(self, tensor: Any) -> bool:
        """Optimizers count their steps in tensors and read the counts: that is no matter of the program."""
        return isinstance(tensor, self._fake) and not self._places.in_optimizer

    def _talk(
        self,
        talker: Talker,
        given: Mapping[str, Any],
        arguments: tuple[Argument, ...],
        results: tuple[TensorRecord, ...],
    ) -> Talk:
        group = self._group(given.get("process_group", given.get("group_name")))
        ranks = self.record.groups.setdefault(group.group_name, ())
        if not ranks:
            ranks = tuple(self._distributed.get_process_group_ranks(group))
            self.record.groups[group.group_name] = ranks
        filled = tensors_at(arguments, talker.fills) if talker.fills >= 0 else results
        local = _whole(arguments, talker.peer)
        return Talk(
            word=talker.word,
            group=group.group_name,
            operand_bytes=bytes_of(tensors_at(arguments, talker.sent)),
            result_bytes=bytes_of(filled) if talker.word != "send" else float("nan"),
            peer=ranks[local] if 0 <= local < len(ranks) else -1,
            tag=_whole(arguments, talker.tag),
            reduction=number_text(given.get("reduce_op", "")),
            ragged=is_ragged(arguments, talker),
        )

    def _group(self, given: Any) -> Any:
        process_group = self._distributed.ProcessGroup
        if isinstance(given, str):
            return torch_module("torch.distributed.distributed_c10d")._resolve_process_group(given)
        return given if isinstance(given, process_group) else process_group.unbox(given)

    def _keep_groups(self) -> None:
        """Groups in the order in which they were made, which is the same on all ranks."""
        order = list(self._distributed.distributed_c10d._world.pg_names.values())
        found = self.record.groups
        self.record.groups = {name: found[name] for name in [*order, *found] if name in found}


def _whole(arguments: tuple[Argument, ...], place: int) -> int:
    text = arguments[place] if 0 <= place < len(arguments) else ""
    return int(text) if isinstance(text, str) and text.isdecimal() else -1


def _flow(
    name: str,
    signature: Signature,
    arguments: tuple[Argument, ...],
    fresh: tuple[int, ...],
    talker: Talker | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Storages that a call reads and writes."""
    if talker is not None:
        read, filled = tensors_at(arguments, talker.sent), tensors_at(arguments, talker.fills)
    else:
        read, filled = (), ()
        for place, each in enumerate(signature.names):
            is_written = place in signature.written or _WRITES.get(name) == each
            if is_written:
                filled += tensors_at(arguments, place)
            if not is_written or not (name in _OVERWRITES or name in _WRITES or each == "out"):
                read += tensors_at(arguments, place)
    return _distinct(each.storage for each in read), _distinct((*(each.storage for each in filled), *fresh))


def _distinct(storages: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(each for each in storages if each >= 0))
