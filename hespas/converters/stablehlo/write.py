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

from hespas.converters.format import Value, WriteOptions
from hespas.converters.stablehlo.bindings import Bindings, ParseFailure, load_bindings
from hespas.converters.stablehlo.forms import Form
from hespas.converters.stablehlo.replay import Replayed, replay
from hespas.converters.stablehlo.replay_text import module_text
from hespas.converters.stablehlo.write_classes import chosen_classes
from hespas.converters.stablehlo.write_exact import ATTACHMENT, original_of
from hespas.converters.stablehlo.write_forms import form_of_name, in_form
from hespas.graph import Diagnostics, OpGraph, RegionKind, Resource, Workload
from hespas.graph.errors import OutputError, UnsupportedError, UsageError
from hespas.graph.passes import UnrollLoops

__all__ = ["write"]

_MOST_OPERATIONS = 500_000
"""Of an unrolled program; XLA takes hours for fewer."""

_FLOPS_TOLERANCE = 0.01
_FEW = 6

_ABSENT: dict[str, str] = {
    "durations": "times are not in a StableHLO program",
    "streams": "streams and host placement are not in a StableHLO program",
    "names": "ids and names are not in the program itself, which is written as it was",
    "costs": "figures that differ from what the program says are not in it",
    "trips": "trip counts that the program does not say are not in it",
    "extra": "attributes of other formats are not in a StableHLO program",
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
    if len(classes) == 1:
        _put(path, programs[classes[0]], packed=name.endswith(".gz"))
        return
    path.mkdir()
    for index, program in programs.items():
        _put(path / f"{name}.{index}.mlir", program, packed=False)


def _put(path: Path, content: bytes, *, packed: bool) -> None:
    try:
        path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            path=str(path),
            hint="free some space or choose another destination",
        ) from error


class _Job(NamedTuple):
    """A workload on its way out."""

    workload: Workload
    form: Form
    version: str
    bindings: Bindings
    diagnostics: Diagnostics

    def program(self, index: int) -> bytes:
        """The program of one class: itself, or a replay."""
        graph, ranks = self.workload.classes[index], self.workload.num_ranks
        reason = "several rank classes are several programs" if ATTACHMENT in graph.attachments else ""
        if len(self.workload.classes) == 1:
            original, reason = original_of(graph, ranks)
            if original is not None:
                _report_absent(graph.name, original.beyond, self.diagnostics)
                return in_form(original.data, original.form, self.form, self.version, self.bindings)
        source = self.workload.metadata.get("format", "op-graph")
        text = _replay_text(graph, ranks, source, reason, self.diagnostics)
        try:
            self.bindings.parse(text)
        except ParseFailure as failure:
            raise UnsupportedError(
                f"{graph.name}: no replay of this graph is a valid program: {failure.message} "
                f"(line {failure.line}:{failure.column} of the replay)",
                hint="`hespas-validate check` finds what is wrong with a graph",
            ) from None
        return in_form(text.encode(), Form.TEXT, self.form, self.version, self.bindings)


def _replay_text(graph: OpGraph, num_ranks: int, source: str, reason: str, diagnostics: Diagnostics) -> str:
    """The replay of one class, its losses reported and listed in it."""
    flat = _flat(graph, diagnostics)
    replayed = replay(flat, num_ranks)
    because = f" ({reason})" if reason else ""
    diagnostics.warning(
        "stablehlo.replay",
        graph.name,
        f"operations replayed: the program does the same work in the same order, but is not the one the "
        f"graph came from{because}",
        count=len(flat),
    )
    absent = _absent(graph)
    _report_absent(graph.name, absent, diagnostics)
    if replayed.num_ranks > num_ranks:
        message = f"groups and messages name ranks not read: it runs on {replayed.num_ranks} devices"
        diagnostics.info("stablehlo.devices", graph.name, message)
    changed = _changes(replayed)
    for code, (count, message) in changed.items():
        diagnostics.info(f"stablehlo.{code}", graph.name, message, count=count)
    _report_flops(flat, replayed, diagnostics)
    counts = {**absent, **{code: count for code, (count, _) in changed.items()}}
    lines = [f"{what}: {count}" for what, count in counts.items() if count]
    return module_text(replayed, graph.name, source, len(flat), lines)


def _flat(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    if not len(graph.regions):
        return graph
    loops = (graph.regions.kind == int(RegionKind.LOOP_BODY)) & ~(graph.regions.trips <= 1)
    diagnostics.info(
        "stablehlo.unrolled", graph.name, "loops are written trip after trip", count=int(loops.sum())
    )
    return UnrollLoops(max_nodes=_MOST_OPERATIONS, unknown_trips=1)(graph, diagnostics)


def _absent(graph: OpGraph) -> dict[str, int]:
    """What a graph knows and no replay holds. Names are in its locations."""
    placed = (graph.stream >= 0) | (graph.resource != int(Resource.DEVICE))
    others = [name for name in graph.attachments if name != ATTACHMENT]
    return {
        "durations": int((~np.isnan(graph.duration_ns)).sum()),
        "streams": int(placed.sum()),
        "extra": len(graph.extra),
        "attachments": len(others),
    }


def _report_absent(name: str, counts: Mapping[str, int], diagnostics: Diagnostics) -> None:
    for what, count in counts.items():
        diagnostics.info(f"stablehlo.{what}", name, _ABSENT[what], count=count)


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


def _report_flops(flat: OpGraph, replayed: Replayed, diagnostics: Diagnostics) -> None:
    """Say so where XLA will count noticeably more or less than the graph says."""
    stated = np.where(np.isnan(flat.useful_flops), flat.flops, flat.useful_flops)
    wanted = float(np.nansum(stated))
    if abs(replayed.flops - wanted) > _FLOPS_TOLERANCE * wanted:
        message = (
            f"XLA counts {replayed.flops:,.0f} FLOPs for the replay, the graph {wanted:,.0f}: sums of "
            "all-reduce count there, and so does what ties operations together"
        )
        diagnostics.warning("stablehlo.replay-flops", flat.name, message)


def _report_ranks(
    workload: Workload, classes: list[int], options: WriteOptions, diagnostics: Diagnostics
) -> None:
    if options.ranks is not None and len(options.ranks) < workload.num_ranks:
        message = f"a StableHLO program is that of all ranks: it is written for {workload.num_ranks} devices"
        diagnostics.info("stablehlo.all-ranks", workload.name, message)
    if len(workload.classes) > 1:
        message = (
            f"each of {len(workload.classes)} rank classes is a program of its own, here for all "
            f"{workload.num_ranks} devices; messages between classes go between its own devices"
        )
        diagnostics.warning("stablehlo.rank-classes", workload.name, message, count=len(classes))
