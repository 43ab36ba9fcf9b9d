"""Writes StableHLO: the program itself where the graph still is one, else a replay (:mod:`.replay`).

One file is the program of one rank class; several classes are a folder of ``NAME.{class}.mlir``.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions, Value, WriteOptions
from hespas.converters.stablehlo.bindings import Bindings, load_bindings
from hespas.converters.stablehlo.forms import Form
from hespas.converters.stablehlo.ranks import ranks_text
from hespas.converters.stablehlo.reader import read_program
from hespas.converters.stablehlo.replay import Replayed, replay
from hespas.converters.stablehlo.replay_figures import compare
from hespas.converters.stablehlo.replay_text import Origin, Share, module_text
from hespas.converters.stablehlo.write_classes import chosen_classes
from hespas.converters.stablehlo.write_exact import ATTACHMENT, original_of
from hespas.converters.stablehlo.write_forms import form_of_name, in_form
from hespas.files.limits import limits
from hespas.graph import Diagnostics, OpGraph, RegionKind, Resource, Workload
from hespas.graph.errors import FormatError, OutputError, UnsupportedError, UsageError
from hespas.graph.passes import UnrollLoops

__all__ = ["write"]

_FEW = 6
_GUESSES = {"comm-bytes", "reduction"}
"""Changes that no longer are what the graph says."""

_OF_FILE = frozenset({"format", "version", "form"})
"""Metadata that a reader of any file states anew."""

_ABSENT: dict[str, str] = {
    "durations": "times are not in a StableHLO program",
    "streams": "streams and host placement are not in a StableHLO program",
    "names": "ids and names are not in the program itself, which is written as it was",
    "costs": "figures that differ from what the program says are not in it",
    "trips": "trip counts that the program does not say are not in it",
    "extra": "attributes of other formats are not in a StableHLO program",
    "communicators": "process groups of the same ranks are one in a StableHLO program",
    "attachments": "documents of other formats are not in a StableHLO program",
}


def write(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write the programs of the chosen ranks' classes.

    Raises ``UnsupportedError`` for what no program can hold, ``UsageError`` where one file is named for
    several classes, ``MissingExtraError`` without jaxlib, and ``OutputError`` where the system refuses.
    """
    if not isinstance(value, Workload):
        raise UnsupportedError(
            "a profile holds measured events and no program", hint="convert the program, or a trace of it"
        )
    classes = chosen_classes(value, options)
    name = options.name or path.name
    if len(classes) > 1 and Path(name).suffix:
        raise UsageError(
            f"{len(classes)} rank classes are as many programs, and this names one file",
            path=name,
            hint="name a folder (with --to stablehlo), or choose ranks of one class with --ranks",
        )
    form = form_of_name(name, options.version)
    job = _Job(value, form, options.version, load_bindings(), diagnostics)
    programs = {index: job.program(index) for index in classes}
    _report_ranks(value, classes, options, diagnostics)
    _report_metadata(value, programs[classes[0]].facts, diagnostics)
    if len(classes) == 1:
        _put(path, programs[classes[0]].content, packed=name.endswith(".gz"))
        return
    path.mkdir()
    for index, program in programs.items():
        _put(path / f"{name}.{index}.mlir", program.content, packed=False)


def _put(path: Path, content: bytes, *, packed: bool) -> None:
    try:
        path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            path=str(path),
            hint="free some space or choose another destination",
        ) from error


class _Program(NamedTuple):
    """A file's content, and the facts about the job that its reader finds in it."""

    content: bytes
    facts: Mapping[str, str]


class _Job(NamedTuple):
    """A workload on its way out."""

    workload: Workload
    form: Form
    version: str
    bindings: Bindings
    diagnostics: Diagnostics

    def program(self, index: int) -> _Program:
        """The program of one class: itself, or a replay."""
        graph, ranks = self.workload.classes[index], self.workload.num_ranks
        reason = "several rank classes are several programs" if ATTACHMENT in graph.attachments else ""
        if len(self.workload.classes) == 1:
            original, reason = original_of(graph, ranks)
            if original is not None:
                _report_absent(graph.name, original.beyond, self.diagnostics)
                same = self.form is original.form and not self.version
                kept = {key: fact for key, fact in original.metadata.items() if same or key != "producer"}
                return _Program(self._in_form(original.data, original.form), kept)
        text, facts = self._replay(index, reason)
        return _Program(self._in_form(text.encode(), Form.TEXT), facts)

    def _in_form(self, data: bytes, form: Form) -> bytes:
        return in_form(data, form, self.form, self.version, self.bindings)

    def _replay(self, index: int, reason: str) -> tuple[str, Mapping[str, str]]:
        """The replay of one class, its losses reported and listed in it, and what its reader finds."""
        graph, found = self.workload.classes[index], self.diagnostics
        flat = _flat(graph, found)
        replayed = replay(flat, self.workload.num_ranks)
        absent = _absent(graph)
        changed = _changes(replayed)
        because = f" ({reason})" if reason else ""
        message = (
            "operations replayed: the program does the same work in the same order, but is not the one the "
            f"graph came from{because}"
        )
        written = len(flat) or 1  # of nothing, a return is left
        found.warning("stablehlo.replay", graph.name, message, count=written)
        _report_absent(graph.name, absent, found)
        _report_changed(graph.name, changed, found)
        if replayed.num_ranks > self.workload.num_ranks:
            message = f"groups and messages name ranks not read: it runs on {replayed.num_ranks} devices"
            found.info("stablehlo.devices", graph.name, message)
        counts = {**absent, **{code: count for code, (count, _) in changed.items()}}
        origin = Origin(graph.name, self.workload.metadata.get("format", "op-graph"), len(flat))
        lines = [f"{what}: {count}" for what, count in counts.items() if count]
        text = module_text(replayed, origin, lines, self._share(index))
        again = self._as_read(text, graph.name)
        compare(flat, replayed, again.classes[0], found)
        return text, again.metadata

    def _share(self, index: int) -> Share | None:
        """Which of several classes a program is of."""
        if len(self.workload.classes) == 1:
            return None
        return Share(index, len(self.workload.classes), ranks_text(self.workload.ranks_of(index)))

    def _as_read(self, text: str, name: str) -> Workload:
        """The replay as its reader sees it: what the file holds. Raises ``UnsupportedError`` where it is no
        program.
        """
        try:
            return read_program(text.encode(), "", ReadOptions(locations=False), Diagnostics())
        except FormatError as error:
            raise UnsupportedError(
                f"{name}: no replay of this graph is a valid program: {error.message} "
                f"({error.position} of the replay)",
                hint="`hespas-validate check` finds what is wrong with a graph",
            ) from None


def _flat(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    if not len(graph.regions):
        return graph
    loops = (graph.regions.kind == int(RegionKind.LOOP_BODY)) & ~(graph.regions.trips <= 1)
    diagnostics.info(
        "stablehlo.unrolled", graph.name, "loops are written trip after trip", count=int(loops.sum())
    )
    return UnrollLoops(max_nodes=limits().replayed_operations, unknown_trips=1)(graph, diagnostics)


def _absent(graph: OpGraph) -> dict[str, int]:
    """What a graph knows and no replay holds. Names are in its locations."""
    placed = (graph.stream >= 0) | (graph.resource != int(Resource.DEVICE))
    others = [name for name in graph.attachments if name != ATTACHMENT]
    several = np.array([groups.communicator > 0 for groups in graph.group_sets] + [False])
    return {
        "durations": int((~np.isnan(graph.duration_ns)).sum()),
        "streams": int(placed.sum()),
        "extra": len(graph.extra),
        "communicators": int(several[graph.collectives.group_set].sum()),
        "attachments": len(others),
    }


def _report_absent(name: str, counts: Mapping[str, int], diagnostics: Diagnostics) -> None:
    for what, count in counts.items():
        diagnostics.info(f"stablehlo.{what}", name, _ABSENT[what], count=count)


def _report_changed(name: str, changed: Mapping[str, tuple[int, str]], diagnostics: Diagnostics) -> None:
    for code, (count, message) in changed.items():
        report = diagnostics.warning if code in _GUESSES else diagnostics.info
        report(f"stablehlo.{code}", name, message, count=count)


def _changes(replayed: Replayed) -> dict[str, tuple[int, str]]:
    """What a replay does in another way: code -> how often, and a message."""
    return {
        "synthesised": (
            replayed.synthesised.total(),
            "operations whose attributes a graph does not hold are others of the same types and FLOPs: "
            + _listed(replayed.synthesised),
        ),
        "substituted": (
            replayed.substituted.total(),
            f"collectives StableHLO does not have: {_listed(replayed.substituted)}",
        ),
        "comm-bytes": (
            replayed.comm_bytes.total(),
            f"payloads that are not those of the graph: {_listed(replayed.comm_bytes)}",
        ),
        "reduction": (
            replayed.reductions.total(),
            f"reductions that are not those of the graph: {_listed(replayed.reductions)}",
        ),
        "types": (replayed.types.total(), f"not kept of tensor types: {_listed(replayed.types)}"),
        "unknown-flops": (
            replayed.unknown_flops,
            "operations of unknown FLOPs are written without arithmetic of their own",
        ),
        "unknown-peer": (replayed.unknown_peers, "messages to nobody known are written as copies"),
        "message-order": (
            replayed.early_messages,
            "messages are received before they are sent: all ranks exchange them when they receive",
        ),
        "channels": (
            replayed.renumbered,
            "collectives that share a channel, or have several operands, got another or none",
        ),
    }


def _listed(counts: Counter[str]) -> str:
    shown = ", ".join(f"{what} ({count})" for what, count in counts.most_common(_FEW))
    return f"{shown}, ..." if len(counts) > _FEW else shown


def _report_metadata(workload: Workload, facts: Mapping[str, str], diagnostics: Diagnostics) -> None:
    """Facts about the job that a reader of the program does not find, or finds otherwise."""
    stated = workload.metadata.items()
    lost = [key for key, fact in stated if key not in _OF_FILE and facts.get(key) != fact]
    message = f"facts about the job are not in a StableHLO program: {', '.join(lost[:_FEW])}"
    diagnostics.info("stablehlo.metadata", workload.name, message, count=len(lost))


def _report_ranks(
    workload: Workload, classes: list[int], options: WriteOptions, diagnostics: Diagnostics
) -> None:
    if not workload.is_complete or (options.ranks is not None and len(options.ranks) < workload.num_ranks):
        message = f"a StableHLO program is that of all ranks: it is written for {workload.num_ranks} devices"
        diagnostics.info("stablehlo.all-ranks", workload.name, message)
    if len(workload.classes) > 1:
        message = (
            f"each of {len(workload.classes)} rank classes is a program of its own, here for all "
            f"{workload.num_ranks} devices; messages between classes go between its own devices"
        )
        diagnostics.warning("stablehlo.rank-classes", workload.name, message, count=len(classes))
