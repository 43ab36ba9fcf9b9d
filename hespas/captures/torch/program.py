"""Runs a user's function as one rank of a job after another, and records a step of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from hespas.captures.mesh import Mesh
from hespas.captures.torch.builder import graph_of
from hespas.captures.torch.calls import Recording
from hespas.captures.torch.classes import find_classes
from hespas.captures.torch.groups import MeshRule
from hespas.captures.torch.library import torch_module
from hespas.captures.torch.places import failing_line
from hespas.captures.torch.recorder import Recorder
from hespas.captures.torch.stages import StageBoard
from hespas.captures.torch.world import rank_of_job
from hespas.graph import GUESSED_VALUES, PROGRAM_BYTES, Diagnostics, OpGraph, Workload
from hespas.graph.errors import HespasError, UsageError

__all__ = ["TensorKind", "capture_torch", "record_rank"]

TensorKind = Literal["fake", "real"]
"""``fake``: tensors have shapes and no data, so that a model of any size fits. ``real``: they have data, for
programs whose operations depend on values; the model has to fit this machine.
"""

_Function = Callable[..., Any]

_STEPS_BEFORE = 2
"""Optimizers make their states in the first step, DDP its buckets at the start of the second."""


def capture_torch(
    function: _Function,
    mesh: Mesh,
    *args: object,
    diagnostics: Diagnostics | None = None,
    name: str = "",
    tensors: TensorKind = "fake",
    compiled: bool = False,
) -> Workload:
    """One step of a PyTorch program, as every rank of ``mesh`` runs it; no device and no other process is
    needed.

    ``function`` gets a ``DeviceMesh`` with the axes of ``mesh`` (of device type ``cpu``; nothing, where it
    takes no argument), then ``args``, with a process group that is set up. It builds model, optimizer and
    data, and returns the step: a function without arguments. That is called twice to come to its steady
    state (states of the optimizer, buckets of DDP), and recorded the third time. Where it returns anything
    else, the function is the step, and all it does is recorded.

    ``torch.compile`` is passed over, and what it was given runs as it is written. With ``compiled`` the
    graphs that AOTAutograd makes of it are recorded, operation by operation and not fused, with the
    collectives that run between them; that takes ``real`` tensors.

    A few ranks are recorded (:mod:`hespas.captures.torch.classes`), each with what it executes itself.

    Raises ``MissingExtraError`` without PyTorch, and ``UsageError`` where a process group exists already
    or the function fails (its own error is the cause).
    """
    if tensors not in {"fake", "real"}:
        raise UsageError(f"tensors: {tensors!r} is neither fake nor real")
    if compiled and tensors != "real":
        raise UsageError("compiled graphs are made of real tensors", hint="say `tensors=real` as well")
    found = Diagnostics() if diagnostics is None else diagnostics
    title = name or getattr(function, "__name__", "step")
    run = partial(record_rank, function, mesh, tensors=tensors, compiled=compiled)
    ranks = _Ranks(lambda rank: run(rank, *args), MeshRule(mesh), title)
    classes, rank_class = find_classes(mesh, ranks.graph_at)
    for rank in classes.first:
        found.extend(ranks.told[rank])
    found.info(
        "torch.ranks-recorded",
        title,
        f"{classes.num_recorded} of {mesh.num_devices:,} ranks were recorded and are"
        f" {len(classes.graphs)} kinds; the others are taken to run what their neighbours run",
    )
    captured_by = f"torch {torch_module().__version__}, {tensors} tensors"
    metadata = {"framework": "torch", "captured_by": captured_by, "mesh": str(mesh)}
    if guessed := sum(ranks.recordings[rank].guessed_values for rank in classes.first):
        metadata[GUESSED_VALUES] = str(guessed)
    return Workload(
        name=title,
        classes=tuple(classes.graphs),
        rank_class=rank_class,
        metadata=metadata | _memory([ranks.recordings[rank] for rank in classes.first]),
    )


class _Ranks:
    """Records ranks as they are asked for, and those whose shapes they need. Calls are kept no longer than it
    takes to make the graph.
    """

    def __init__(self, record: Callable[[int], Recording], rule: MeshRule, title: str) -> None:
        self.recordings: dict[int, Recording] = {}
        self.told: dict[int, Diagnostics] = {}
        self._record = record
        self._rule = rule
        self._title = title
        self._board = StageBoard()

    def graph_at(self, rank: int) -> OpGraph:
        """The graph of a rank; what there is to tell of it is in ``told``."""
        if rank not in self.recordings:
            self.recordings.update(self._board.in_turn(rank, self._run))
        recording = self.recordings[rank]
        told = self.told[rank] = Diagnostics()
        graph = graph_of(recording, self._rule, self._title, told.about(self._title, "torch"))
        recording.calls.clear()
        return graph

    def _run(self, rank: int) -> Recording:
        try:
            with self._board.on(rank):
                return self._record(rank)
        except HespasError:
            raise
        except Exception as error:  # whatever the user's program raises
            told = f"{type(error).__name__}: {str(error).strip() or 'without a message'}"
            raise UsageError(
                f"{self._title} fails on rank {rank}: {told}",
                position=failing_line(error),
                hint="run it as it is with one rank first; what depends on values needs `real_tensors`",
            ) from error


def _memory(kinds: Sequence[Recording]) -> dict[str, str]:
    """Of each class: state is read and written over, what a step makes and keeps comes on top; the peak."""
    held = [
        f"{each.state_bytes} {each.state_bytes + max(each.kept_bytes, 0)} {each.state_bytes}"
        for each in kinds
    ]
    return {
        PROGRAM_BYTES: ";".join(held),
        "recorded_peak_bytes": ";".join(str(each.peak_bytes) for each in kinds),
    }


def record_rank(
    function: _Function,
    mesh: Mesh,
    rank: int,
    *args: object,
    tensors: TensorKind = "fake",
    compiled: bool = False,
) -> Recording:
    """What one rank executes: see :func:`capture_torch`."""
    fake = tensors == "fake"
    with rank_of_job(rank, mesh.sizes, mesh.names, fake=fake, compiled=compiled) as job, job.tensors():
        given = (job.mesh, *args) if _takes_any(function) else args
        whole = Recorder(rank, mesh.num_devices, compiled=compiled)
        with whole.recording():
            step = function(*given)
        if not callable(step):
            whole.record.note(
                "no-step", "the function returned no step: all it did is recorded, making the model included"
            )
            return whole.record
        for _ in range(_STEPS_BEFORE):
            step()
        recorder = Recorder(rank, mesh.num_devices, compiled=compiled)
        with recorder.recording():
            step()
        return recorder.record


def _takes_any(function: _Function) -> bool:
    with suppress(TypeError, ValueError):
        return bool(inspect.signature(function).parameters)
    return True
