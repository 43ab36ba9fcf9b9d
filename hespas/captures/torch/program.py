"""Capture of a user's PyTorch function: it runs as one rank of a job after another, and one step of each is
recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from hespas.captures.torch.builder import MeshRule, graph_of
from hespas.captures.torch.calls import RankRecording
from hespas.captures.torch.classes import find_classes
from hespas.captures.torch.library import torch_module
from hespas.captures.torch.recorder import StepRecorder, failing_line
from hespas.captures.torch.world import ShapeExchange, rank_of_job
from hespas.graph import GUESSED_VALUES, PROGRAM_BYTES, Diagnostics, OpGraph, Workload
from hespas.graph.errors import HespasError, UsageError
from hespas.graph.mesh import Mesh

__all__ = ["TensorKind", "capture_torch", "record_rank"]

TensorKind = Literal["fake", "real"]
"""Kind of the tensors of a captured program.

``fake`` tensors have shapes but no data, so that a model of any size fits. ``real`` tensors have data, for
programs whose operations depend on values; the model has to fit this machine.
"""

_Function = Callable[..., Any]

_UNRECORDED_STEPS = 2
"""Steps before the recorded one: optimizers allocate their states in the first, DDP its buckets in the
second.
"""


def capture_torch(
    function: _Function,
    mesh: Mesh,
    *args: object,
    diagnostics: Diagnostics | None = None,
    name: str = "",
    tensors: TensorKind = "fake",
    compiled: bool = False,
) -> Workload:
    """Capture one step of a PyTorch program on every rank of ``mesh``, without devices or other processes.

    ``function`` is called with a ``DeviceMesh`` with the axes of ``mesh`` (device type ``cpu``; omitted if
    the function takes no argument) and ``args``, inside an initialised process group. It builds model,
    optimizer and data, and returns the step: a function without arguments. The step runs twice to reach its
    steady state (optimizer state, DDP buckets), and is recorded in the third run. If ``function`` returns
    anything else, ``function`` itself is the step, and all of it is recorded.

    ``torch.compile`` is ignored by default: the program runs as written. With ``compiled`` the graphs of
    AOTAutograd are recorded, operation by operation and not fused, with the collectives between them; that
    requires ``real`` tensors.

    Only a few ranks are recorded (:mod:`hespas.captures.torch.classes`), each with the operations that it
    executes itself.

    Raises ``MissingExtraError`` without PyTorch, and ``UsageError`` if a process group exists already or the
    function fails (its own error is the cause).
    """
    if tensors not in {"fake", "real"}:
        raise UsageError(f"unknown kind of tensors {tensors!r}", hint="use fake or real")
    if compiled and tensors != "real":
        raise UsageError("compiled graphs need real tensors", hint="add `real_tensors`")
    diagnostics = Diagnostics() if diagnostics is None else diagnostics
    title = name or getattr(function, "__name__", "step")
    run = partial(record_rank, function, mesh, tensors=tensors, compiled=compiled)
    ranks = _RecordedRanks(lambda rank: run(rank, *args), MeshRule(mesh), title)
    classes, rank_class = find_classes(mesh, ranks.graph_at)
    for rank in classes.first:
        diagnostics.extend(ranks.diagnostics[rank])
    diagnostics.info(
        "torch.ranks-recorded",
        title,
        f"{classes.num_recorded} of {mesh.num_devices:,} ranks were recorded and form"
        f" {len(classes.graphs)} rank classes; the other ranks are assumed to equal their neighbours",
    )
    captured_by = f"torch {torch_module().__version__}, {tensors} tensors"
    metadata = {"framework": "torch", "captured_by": captured_by, "mesh": str(mesh)}
    recordings = [ranks.recordings[rank] for rank in classes.first]
    if guessed := sum(recording.guessed_values for recording in recordings):
        metadata[GUESSED_VALUES] = str(guessed)
    # For each class: state is read and overwritten; what a step makes and does not free is added to it.
    metadata[PROGRAM_BYTES] = ";".join(
        f"{recording.state_bytes} {recording.state_bytes + max(recording.kept_bytes, 0)} "
        f"{recording.state_bytes}"
        for recording in recordings
    )
    metadata["recorded_peak_bytes"] = ";".join(str(recording.peak_bytes) for recording in recordings)
    return Workload(name=title, classes=tuple(classes.graphs), rank_class=rank_class, metadata=metadata)


class _RecordedRanks:
    """Cache of recorded ranks. A rank is recorded when it is first needed. The ranks from which it receives
    tensor shapes are recorded before. The calls of a rank are dropped once its graph is made.
    """

    def __init__(self, record: Callable[[int], RankRecording], rule: MeshRule, title: str) -> None:
        self.recordings: dict[int, RankRecording] = {}
        self.diagnostics: dict[int, Diagnostics] = {}
        self._record = record
        self._rule = rule
        self._title = title
        self._exchange = ShapeExchange()

    def graph_at(self, rank: int) -> OpGraph:
        """Return the graph of a rank, and store its findings in ``diagnostics``."""

        def run(rank: int) -> RankRecording:
            try:
                with self._exchange.on(rank):
                    return self._record(rank)
            except HespasError:
                raise
            except Exception as error:  # the user's program may raise anything
                reason = f"{type(error).__name__}: {str(error).strip() or 'without a message'}"
                raise UsageError(
                    f"{self._title} fails on rank {rank}: {reason}",
                    position=failing_line(error),
                    hint="run it unchanged with one rank first; add `real_tensors` if its operations depend "
                    "on values",
                ) from error

        if rank not in self.recordings:
            self.recordings.update(self._exchange.run_in_order(rank, run))
        recording = self.recordings[rank]
        diagnostics = self.diagnostics[rank] = Diagnostics()
        graph = graph_of(recording, self._rule, self._title, diagnostics.about(self._title, "torch"))
        recording.calls.clear()
        return graph


def record_rank(
    function: _Function,
    mesh: Mesh,
    rank: int,
    *args: object,
    tensors: TensorKind = "fake",
    compiled: bool = False,
) -> RankRecording:
    """Run the program as one rank and return its recorded operations. The arguments are the same as in
    :func:`capture_torch`.
    """
    takes_mesh = True
    with suppress(TypeError, ValueError):
        takes_mesh = bool(inspect.signature(function).parameters)
    fake = tensors == "fake"
    with rank_of_job(rank, mesh.sizes, mesh.names, fake=fake, compiled=compiled) as job, job.tensors():
        whole = StepRecorder(rank, mesh.num_devices, compiled=compiled)
        with whole.recording():
            step = function(job.mesh, *args) if takes_mesh else function(*args)
        if not callable(step):
            whole.record.note(
                "no-step",
                "the function returned no step: all of its operations are recorded, including those that "
                "make the model",
            )
            return whole.record
        for _ in range(_UNRECORDED_STEPS):
            step()
        recorder = StepRecorder(rank, mesh.num_devices, compiled=compiled)
        with recorder.recording():
            step()
        return recorder.record
