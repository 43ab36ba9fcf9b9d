"""Writer of StableHLO: the original program if the graph is unchanged since it was read, else a replay
(:mod:`.replay`).

A file is the program of one rank class; several classes are a folder of ``NAME.{class}.mlir``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions, Value, WriteOptions
from hespas.converters.stablehlo import ATTACHMENT, CLASS_MARK, chosen_classes
from hespas.converters.stablehlo.mlir import Bindings, load_bindings
from hespas.converters.stablehlo.program import ProgramForm, form_of_name, in_form
from hespas.converters.stablehlo.reader import ranks_text, read_program
from hespas.converters.stablehlo.replay import ProgramReplay, compare, replay
from hespas.converters.stablehlo.replay_emit import quoted_text
from hespas.files.limits import limits
from hespas.files.streams import open_output
from hespas.graph import Diagnostics, OpGraph, RegionKind, Resource, Workload
from hespas.graph.equality import graphs_equal
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from hespas.graph.passes import UnrollLoops

__all__ = ["write"]

_FEW = 6
_CHANGES_OF_VALUES = {"comm-bytes", "reduction"}
"""Changes after which a value differs from the graph."""

_OF_FILE = frozenset({"format", "version", "form"})
"""Metadata that a reader of any file sets anew."""

_OMISSIONS: dict[str, str] = {
    "durations": "times are not in a StableHLO program",
    "streams": "streams and host placement are not in a StableHLO program",
    "names": "ids and names are not in the program itself, which is written as it was",
    "costs": "costs that differ from the program's own are not in it",
    "trips": "trip counts that the program does not state are not in it",
    "extra": "attributes of other formats are not in a StableHLO program",
    "communicators": "process groups of the same ranks are merged in a StableHLO program",
    "attachments": "attachments of other formats are not in a StableHLO program",
}

_CHANGES: dict[str, str] = {
    "synthesised": "operations of unknown attributes are replaced by others of the same types and FLOPs: ",
    "substituted": "collectives without a StableHLO equivalent are replaced: ",
    "comm-bytes": "payloads that differ from the graph: ",
    "reduction": "reductions that differ from the graph: ",
    "types": "properties of tensor types that are not kept: ",
    "unknown-flops": "operations of unknown FLOPs are written as copies, marked with `hespas.unknown_work`",
    "unknown-peer": "messages with unknown peers are written as copies",
    "message-order": "messages are received before they are sent: all ranks exchange them at the receive",
    "channels": "collectives that share a channel, or have several operands, have another channel or none",
}
"""Differences between a replay and its graph, by the code of their report."""


def write(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write one program per rank class of the chosen ranks.

    Raises ``UnsupportedError`` for a value that a program cannot represent, ``UsageError`` if one file is
    named for several classes, ``MissingExtraError`` without jaxlib, and ``OutputError`` for a failed write.
    """
    if not isinstance(value, Workload):
        raise UnsupportedError(
            "a profile holds measured events, not a program", hint="convert the program, or a trace of it"
        )
    classes = chosen_classes(value, options)
    name = options.name or path.name
    if len(classes) > 1 and Path(name).suffix:
        raise UsageError(
            f"{len(classes)} rank classes need as many programs, but the path names one file",
            path=name,
            hint="name a folder (with `target_format=stablehlo`), or choose ranks of one class with `ranks`",
        )
    form = form_of_name(name, options.version)
    job = _ProgramWriter(value, form, options.version, load_bindings(), diagnostics)
    programs = {index: job.program(index) for index in classes}
    if not value.is_complete or (options.ranks is not None and len(options.ranks) < value.num_ranks):
        rank_message = f"a StableHLO program runs on all ranks: it is written for {value.num_ranks} devices"
        diagnostics.info("stablehlo.all-ranks", value.name, rank_message)
    if len(value.classes) > 1:
        rank_message = (
            f"each of {len(value.classes)} rank classes is a separate program for all "
            f"{value.num_ranks} devices; messages between classes are sent between devices of one program"
        )
        diagnostics.warning("stablehlo.rank-classes", value.name, rank_message, count=len(classes))
    metadata = programs[classes[0]].metadata
    entries = value.metadata.items()
    lost_keys = [key for key, text in entries if key not in _OF_FILE and metadata.get(key) != text]
    message = f"metadata is not in a StableHLO program: {', '.join(lost_keys[:_FEW])}"
    diagnostics.info("stablehlo.metadata", value.name, message, count=len(lost_keys))
    if len(classes) == 1:
        _put(path, programs[classes[0]].content, packed=name.endswith(".gz"))
        return
    path.mkdir()
    for index, program in programs.items():
        _put(path / f"{name}.{index}.mlir", program.content, packed=False)


def _put(path: Path, content: bytes, *, packed: bool) -> None:
    with open_output(path, packed=packed) as stream:
        stream.write(content)


class _WrittenProgram(NamedTuple):
    """Content of a program file, and the workload metadata that a reader of the file returns."""

    content: bytes
    metadata: Mapping[str, str]


class _ProgramWriter(NamedTuple):
    """Writer of a workload's programs in one form and version."""

    workload: Workload
    form: ProgramForm
    version: str
    bindings: Bindings
    diagnostics: Diagnostics

    def program(self, index: int) -> _WrittenProgram:
        """Return the program of one rank class: the original program if the graph came from one, else a
        replay.
        """
        graph, ranks = self.workload.classes[index], self.workload.num_ranks
        reason = "each rank class is a separate program" if ATTACHMENT in graph.attachments else ""
        if len(self.workload.classes) == 1:
            original, reason = _original_of(graph, ranks)
            if original is not None:
                _report_absent(graph.name, original.beyond, self.diagnostics)
                same = self.form is original.form and not self.version
                original_metadata = {
                    key: text for key, text in original.metadata.items() if same or key != "producer"
                }
                return _WrittenProgram(self._in_form(original.data, original.form), original_metadata)
        text, metadata = self._replay(index, reason)
        return _WrittenProgram(self._in_form(text.encode(), ProgramForm.TEXT), metadata)

    def _in_form(self, data: bytes, form: ProgramForm) -> bytes:
        return in_form(data, form, self.form, self.version, self.bindings)

    def _replay(self, index: int, reason: str) -> tuple[str, Mapping[str, str]]:
        """Return the replay of one class and the metadata that its reader returns. Losses are reported, and
        listed in the replay.
        """
        graph, diagnostics = self.workload.classes[index], self.diagnostics
        flat = graph
        if len(graph.regions):
            loops = (graph.regions.kind == int(RegionKind.LOOP_BODY)) & ~(graph.regions.trips <= 1)
            diagnostics.info("stablehlo.unrolled", graph.name, "loops are unrolled", count=int(loops.sum()))
            # Iterations may overlap: a compiler orders operations by their values, and waiting between
            # iterations would need extra operations.
            most = limits().replayed_operations
            flat = UnrollLoops(max_nodes=most, unknown_trips=1, overlap_trips=True)(graph, diagnostics)
        replayed = replay(flat, self.workload.num_ranks)
        # Count what a replay cannot hold, such as durations. Names become locations.
        placed = (graph.stream >= 0) | (graph.resource != int(Resource.DEVICE))
        others = [name for name in graph.attachments if name != ATTACHMENT]
        several = np.array([groups.communicator > 0 for groups in graph.group_sets] + [False])
        absent = {
            "durations": int((~np.isnan(graph.duration_ns)).sum()),
            "streams": int(placed.sum()),
            "extra": len(flat.extra) - replayed.kept_extra,
            "communicators": int(several[graph.collectives.group_set].sum()),
            "attachments": len(others),
        }
        because = f" ({reason})" if reason else ""
        message = (
            "operations replayed: the program does the same work in the same order, but is not the graph's "
            f"original program{because}"
        )
        written = len(flat) or 1  # an empty graph is written as a return
        diagnostics.warning("stablehlo.replay", graph.name, message, count=written)
        _report_absent(graph.name, absent, diagnostics)
        for change, change_message in _CHANGES.items():
            if change in replayed.changes:
                report = diagnostics.warning if change in _CHANGES_OF_VALUES else diagnostics.info
                examples = replayed.changes[change]
                shown = ", ".join(f"{what} ({count})" for what, count in examples.most_common(_FEW) if what)
                report(
                    f"stablehlo.{change}",
                    graph.name,
                    change_message + (f"{shown}, ..." if len(examples) > _FEW else shown),
                    count=replayed.changes[change].total(),
                )
        if replayed.num_ranks > self.workload.num_ranks:
            message = (
                "groups and messages name ranks that were not read: "
                f"the program runs on {replayed.num_ranks} devices"
            )
            diagnostics.info("stablehlo.devices", graph.name, message)
        changed = {code: replayed.changes[code].total() for code in _CHANGES if code in replayed.changes}
        counts = {**absent, **changed}
        lines = [f"{what}: {count}" for what, count in counts.items() if count]
        text = _module_text(replayed, flat, lines, self.workload, index)
        try:
            read_back = read_program(text.encode(), "", ReadOptions(locations=False), Diagnostics())
        except FormatError as error:
            raise UnsupportedError(
                f"{graph.name}: no replay of this graph is a valid program: {error.message} "
                f"({error.position} of the replay)",
                hint="find the invalid operation with `hespas-validate check`",
            ) from None
        compare(flat, replayed, read_back.classes[0], diagnostics)
        return text, read_back.metadata


def _report_absent(name: str, counts: Mapping[str, int], diagnostics: Diagnostics) -> None:
    for what, count in counts.items():
        diagnostics.info(f"stablehlo.{what}", name, _OMISSIONS[what], count=count)


_ANNOTATIONS: dict[str, str] = {
    column: what
    for what, columns in {
        "durations": "duration_ns",
        "streams": "stream resource",
        "names": "id name name_id framework_id regions.label",
        "costs": "op_class rate_dtype flops useful_flops transcendentals bytes_read bytes_written "
        "collectives.comm_bytes collectives.operand_bytes collectives.result_bytes p2p.comm_bytes",
        "trips": "executions regions.trips",
        "attachments": "attachments",
        "": "source_id",
    }.items()
    for column in columns.split()
}
"""Column -> kind of value that is reported as absent from the program. Source lines are not reported, since
they belong to another file.
"""


class _OriginalProgram(NamedTuple):
    """Program that a graph was read from. ``beyond`` counts, by kind, the values in the graph that the
    program does not state (times, for example). ``metadata`` is the metadata that a reader of the program
    returns.
    """

    data: bytes
    form: ProgramForm
    beyond: dict[str, int]
    metadata: Mapping[str, str]


def _original_of(graph: OpGraph, num_ranks: int) -> tuple[_OriginalProgram | None, str]:
    """Return the program that a graph was read from, if all ``num_ranks`` ranks run it. Otherwise return None
    and the reason, which is empty if the graph was not read from a program.

    The program is read again and compared with the graph, so that a changed graph is always detected. Values
    that a program does not state may differ: times, streams, names, costs. If a pass has changed the
    structure, the graph is another program. An unreadable attachment is ignored.
    """
    data = graph.attachments.get(ATTACHMENT)
    if data is None:
        return None, ""
    try:
        again = read_program(data, ATTACHMENT, ReadOptions(num_devices=num_ranks), Diagnostics())
    except HespasError as error:
        return None, f"the program attached to the graph cannot be read: {error.message}"
    if again.num_ranks != num_ranks:
        return None, f"the program runs on {again.num_ranks} devices, the graph on {num_ranks}"
    beyond: dict[str, int] = {}
    changed: list[str] = []
    source = again.classes[0]
    for difference in graphs_equal(graph, source):
        table = difference.column.partition(".")[0]
        what = _ANNOTATIONS.get(difference.column)
        if table in {"extra", "contractions"}:
            what = "extra" if table == "extra" else "costs"
        is_structure = what is None
        if difference.column == "regions.trips":  # trip counts that the program states are structure
            is_stated = ~np.isnan(source.regions.trips)
            is_structure = len(graph.regions) != len(source.regions) or bool(
                (graph.regions.trips[is_stated] != source.regions.trips[is_stated]).any()
            )
        if is_structure:
            changed.append(difference.column)
        elif what:
            beyond[what] = beyond.get(what, 0) + difference.count
    if changed:
        return None, f"passes or edits changed the program that it was read from: {', '.join(changed)}"
    return _OriginalProgram(data, ProgramForm(again.metadata["form"]), beyond, again.metadata), ""


def _module_text(
    replayed: ProgramReplay, flat: OpGraph, not_kept: Sequence[str], workload: Workload, index: int
) -> str:
    """Return the replay of rank class ``index`` as text.

    The attribute ``hespas.replay`` holds the source format, the number of operations of the graph and the
    ranks of the class. ``not_kept`` are lines about lost values, such as ``durations: 12``.
    """
    emitter = replayed.emitter
    aliases = [f"{alias} = {attribute}" for attribute, alias in emitter.aliases.items()]
    arguments = ", ".join(f"%arg{number}: {tensor}" for number, tensor in enumerate(emitter.arguments))
    kinds = ", ".join(str(value.type) for value in replayed.outputs)
    listed = ", ".join(quoted_text(line) for line in not_kept)
    classes = len(workload.classes)
    ranks = f"ranks = {quoted_text(ranks_text(workload.ranks_of(index)))}, " if classes > 1 else ""
    source = workload.metadata.get("format", "op-graph")
    marks = (
        f"hespas.replay = {{flops = {replayed.flops!r} : f64, not_kept = [{listed}], "
        f"operations = {len(flat)} : i64, {ranks}source = {quoted_text(source)}}}"
    )
    attributes = f"{marks}, mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replayed.num_ranks} : i32"
    names = ", ".join(str(value) for value in replayed.outputs)
    ends = f"return {names} : {kinds}" if names else "return"
    lines = [
        "// A replay: the work of a graph in its order, not the graph's original program.",
        *([f"{CLASS_MARK} {index} of {classes}"] if classes > 1 else []),
        *aliases,
        f"module @{quoted_text(workload.classes[index].name or 'replay')} attributes {{{attributes}}} {{",
        f"  func.func public @main({arguments}) -> ({kinds}) {{",
        "    %zero = stablehlo.constant dense<0> : tensor<i32>",
        *emitter.lines,
        f"    {ends}",
        "  }",
        "}",
        "",
    ]
    return "\n".join(lines)
