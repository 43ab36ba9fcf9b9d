"""Writes StableHLO: the program itself where the graph still is one, else a replay (:mod:`.replay`).

One file is the program of one rank class; several classes are a folder of ``NAME.{class}.mlir``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions, Value, WriteOptions
from hespas.converters.stablehlo import CLASS_MARK, chosen_classes
from hespas.converters.stablehlo.mlir import Bindings, Module, ParseFailure, load_bindings
from hespas.converters.stablehlo.module import ranks_text
from hespas.converters.stablehlo.program import Form, parse_program
from hespas.converters.stablehlo.reader import read_program
from hespas.converters.stablehlo.replay import Replayed, compare, replay
from hespas.converters.stablehlo.replay_emit import quoted_text
from hespas.files.streams import limits, open_output
from hespas.graph import Diagnostics, OpGraph, RegionKind, Resource, Workload
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from hespas.graph.passes import UnrollLoops
from hespas.graph.workload import graphs_equal

__all__ = ["form_of_name", "in_form", "write"]

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
    "attachments": "attachments of other formats are not in a StableHLO program",
}


_CHANGED: dict[str, str] = {
    "synthesised": (
        "operations whose attributes a graph does not hold are others of the same types and FLOPs: "
    ),
    "substituted": "collectives StableHLO does not have: ",
    "comm-bytes": "payloads that are not those of the graph: ",
    "reduction": "reductions that are not those of the graph: ",
    "types": "not kept of tensor types: ",
    "unknown-flops": "operations of unknown FLOPs are written as copies, marked with `hespas.unknown_work`",
    "unknown-peer": "messages to nobody known are written as copies",
    "message-order": "messages are received before they are sent: all ranks exchange them when they receive",
    "channels": "collectives that share a channel, or have several operands, got another or none",
}
"""What a replay does in another way, by the code it is reported under."""


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
            hint="name a folder (with `target_format=stablehlo`), or choose ranks of one class with `ranks`",
        )
    form = form_of_name(name, options.version)
    job = _Job(value, form, options.version, load_bindings(), diagnostics)
    programs = {index: job.program(index) for index in classes}
    _report_ranks(value, classes, options, diagnostics)
    _report_metadata(value, programs[classes[0]].metadata, diagnostics)
    if len(classes) == 1:
        _put(path, programs[classes[0]].content, packed=name.endswith(".gz"))
        return
    path.mkdir()
    for index, program in programs.items():
        _put(path / f"{name}.{index}.mlir", program.content, packed=False)


def _put(path: Path, content: bytes, *, packed: bool) -> None:
    with open_output(path, packed=packed) as stream:
        stream.write(content)


class _Program(NamedTuple):
    """A file's content, and the metadata that its reader finds in it."""

    content: bytes
    metadata: Mapping[str, str]


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
        reason = "several rank classes are several programs" if _ATTACHMENT in graph.attachments else ""
        if len(self.workload.classes) == 1:
            original, reason = _original_of(graph, ranks)
            if original is not None:
                _report_absent(graph.name, original.beyond, self.diagnostics)
                same = self.form is original.form and not self.version
                kept = {key: text for key, text in original.metadata.items() if same or key != "producer"}
                return _Program(self._in_form(original.data, original.form), kept)
        text, metadata = self._replay(index, reason)
        return _Program(self._in_form(text.encode(), Form.TEXT), metadata)

    def _in_form(self, data: bytes, form: Form) -> bytes:
        return in_form(data, form, self.form, self.version, self.bindings)

    def _replay(self, index: int, reason: str) -> tuple[str, Mapping[str, str]]:
        """The replay of one class, its losses reported and listed in it, and what its reader finds."""
        graph, found = self.workload.classes[index], self.diagnostics
        flat = _flat(graph, found)
        replayed = replay(flat, self.workload.num_ranks)
        absent = _absent(graph)
        because = f" ({reason})" if reason else ""
        message = (
            "operations replayed: the program does the same work in the same order, but is not the one the "
            f"graph came from{because}"
        )
        written = len(flat) or 1  # of nothing, a return is left
        found.warning("stablehlo.replay", graph.name, message, count=written)
        _report_absent(graph.name, absent, found)
        _report_changed(graph.name, replayed.changes, found)
        if replayed.num_ranks > self.workload.num_ranks:
            message = f"groups and messages name ranks not read: it runs on {replayed.num_ranks} devices"
            found.info("stablehlo.devices", graph.name, message)
        changed = {code: replayed.changes[code].total() for code in _CHANGED if code in replayed.changes}
        counts = {**absent, **changed}
        lines = [f"{what}: {count}" for what, count in counts.items() if count]
        text = _module_text(replayed, flat, lines, self.workload, index)
        again = self._as_read(text, graph.name)
        compare(flat, replayed, again.classes[0], found)
        return text, again.metadata

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
    # A compiler orders what it is given by its values: to make trips wait would take operations of no use.
    most = limits().replayed_operations
    return UnrollLoops(max_nodes=most, unknown_trips=1, overlap_trips=True)(graph, diagnostics)


def _absent(graph: OpGraph) -> dict[str, int]:
    """What a graph knows and no replay holds. Names are in its locations."""
    placed = (graph.stream >= 0) | (graph.resource != int(Resource.DEVICE))
    others = [name for name in graph.attachments if name != _ATTACHMENT]
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


def _report_changed(name: str, changes: Mapping[str, Counter[str]], diagnostics: Diagnostics) -> None:
    for code, message in _CHANGED.items():
        if code in changes:
            report = diagnostics.warning if code in _GUESSES else diagnostics.info
            report(f"stablehlo.{code}", name, message + _listed(changes[code]), count=changes[code].total())


def _listed(counts: Counter[str]) -> str:
    shown = ", ".join(f"{what} ({count})" for what, count in counts.most_common(_FEW) if what)
    return f"{shown}, ..." if len(counts) > _FEW else shown


def _report_metadata(workload: Workload, metadata: Mapping[str, str], diagnostics: Diagnostics) -> None:
    """Metadata that a reader of the program does not find, or finds otherwise."""
    stated = workload.metadata.items()
    lost = [key for key, text in stated if key not in _OF_FILE and metadata.get(key) != text]
    message = f"metadata is not in a StableHLO program: {', '.join(lost[:_FEW])}"
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


# Whether a graph still is the program it was read from, so that the program itself can be written.
#
# The program is read again and compared: no mark can go stale. What may differ is what a program does not
# say: times, streams, names, costs. Another structure, as passes make, is another program.

_ATTACHMENT = "stablehlo"

_ANNOTATIONS: dict[str, str] = {
    column: what
    for what, columns in {
        "durations": "duration_ns",
        "streams": "stream resource",
        "names": "id name name_row framework_row regions.label",
        "costs": "op_class rate_dtype flops useful_flops transcendentals bytes_read bytes_written "
        "collectives.comm_bytes collectives.operand_bytes collectives.result_bytes p2p.comm_bytes",
        "trips": "multiplicity regions.trips",
        "attachments": "attachments",
        "": "source_row",
    }.items()
    for column in columns.split()
}
"""Column -> what is reported not to be in the program. Lines of the file itself are another file's."""


class _Original(NamedTuple):
    """A program as stored, how many values of what kind the graph has beyond it, and what its reader says of
    the file.
    """

    data: bytes
    form: Form
    beyond: dict[str, int]
    metadata: Mapping[str, str]


def _original_of(graph: OpGraph, num_ranks: int) -> tuple[_Original | None, str]:
    """The program of a graph that all ``num_ranks`` ranks run, or why there is none: empty where it never was
    one. An attachment that cannot be read is none.
    """
    data = graph.attachments.get(_ATTACHMENT)
    if data is None:
        return None, ""
    try:
        again = read_program(data, _ATTACHMENT, ReadOptions(num_devices=num_ranks), Diagnostics())
    except HespasError as error:
        return None, f"the program attached to the graph cannot be read: {error.message}"
    if again.num_ranks != num_ranks:
        return None, f"the program runs on {again.num_ranks} devices, the graph on {num_ranks}"
    beyond: dict[str, int] = {}
    changed: list[str] = []
    source = again.classes[0]
    for difference in graphs_equal(graph, source):
        what = _what(difference.column)
        if what is None or (difference.column == "regions.trips" and not _only_new_trips(graph, source)):
            changed.append(difference.column)
        elif what:
            beyond[what] = beyond.get(what, 0) + difference.count
    if changed:
        return None, f"passes or edits changed the program it was read from: {', '.join(changed)}"
    return _Original(data, Form(again.metadata["form"]), beyond, again.metadata), ""


def _what(column: str) -> str | None:
    """What a differing column is an annotation of, None where it is the program's structure."""
    table = column.partition(".")[0]
    if table in {"extra", "contractions"}:
        return "extra" if table == "extra" else "costs"
    return _ANNOTATIONS.get(column)


def _only_new_trips(graph: OpGraph, source: OpGraph) -> bool:
    """Whether trip counts differ only where the program does not say them."""
    if len(graph.regions) != len(source.regions):
        return False
    stated = ~np.isnan(source.regions.trips)
    return bool((graph.regions.trips[stated] == source.regions.trips[stated]).all())


# The form a program is written in, told by the name of the file, and how a parsed program gets it.

_BINARY = {".mlirbc", ".bc"}
_EXPORT = {".jaxexport", ".jax_export"}
_KNOWN_PLACE = re.compile(r'loc\((?!unknown\)|#loc|"-":\d)')
"""A location other than those of a text that nobody has."""


def form_of_name(name: str, version: str) -> Form:
    """The form that a file name asks for; a name that says nothing asks for text.

    Bytecode has no version: with one, a portable artifact is written. Raises ``UsageError`` for text of a
    version.
    """
    suffixes = [suffix for suffix in PurePath(name).suffixes if suffix != ".gz"]
    last = suffixes[-1] if suffixes else ""
    if last in _EXPORT:
        return Form.EXPORT
    if last == ".vhlo" or (last in _BINARY and (version or ".vhlo" in suffixes)):
        return Form.ARTIFACT
    if last in _BINARY:
        return Form.BYTECODE
    if version:
        raise UsageError(
            f"`target_version={version}`: text has no version",
            path=name,
            hint="name a portable artifact, FILE.vhlo, or leave the version out",
        )
    return Form.TEXT


def in_form(data: bytes, own: Form, form: Form, version: str, bindings: Bindings) -> bytes:
    """A program that is known to parse, in a form: as it is where ``own`` is that form already.

    Raises ``UnsupportedError`` where it has no such form.
    """
    if form is own and not version:
        return data
    module = parse_program(data, bindings).module
    match form:
        case Form.TEXT:
            return _text(module, bindings).encode()
        case Form.BYTECODE:
            return bindings.bytecode(module)
        case Form.ARTIFACT:
            return _artifact(module, version, bindings)
        case Form.EXPORT:
            raise UnsupportedError(
                "a jax.export file also holds calling conventions, which no other form of a program has",
                hint="name a portable artifact, FILE.vhlo",
            )


def _artifact(module: Module, version: str, bindings: Bindings) -> bytes:
    try:
        return bindings.artifact(module, version)
    except ValueError as error:
        raise UnsupportedError(
            f"no portable artifact of StableHLO {version or 'as this jaxlib knows it'} can hold the program "
            f"({error})",
            hint="name a newer `target_version`, or write bytecode: FILE.mlirbc",
        ) from None


def _text(module: Module, bindings: Bindings) -> str:
    """The program as text that parses to the same program: pretty where that is so, else generic."""
    located = bindings.text(module, locations=True)
    has_places = _KNOWN_PLACE.search(located) is not None
    text = located if has_places else bindings.text(module, locations=False)
    return (
        text
        if _is_same(text, module, bindings)
        else bindings.text(module, locations=has_places, generic=True)
    )


def _is_same(text: str, module: Module, bindings: Bindings) -> bool:
    try:
        again = bindings.parse(text, quantised="!quant." in text)
    except ParseFailure:
        return False
    one, two = (bindings.text(each, locations=False, generic=True) for each in (module, again))
    return one == two


# The module around a replay: header, arguments, results, and what was not kept, for readers of the file.


def _module_text(
    replayed: Replayed, flat: OpGraph, not_kept: Sequence[str], workload: Workload, index: int
) -> str:
    """The program of rank class ``index`` as text. ``hespas.replay`` marks it, with the format and the number
    of operations of the graph, and the ranks of the class; ``not_kept`` are lines like ``durations: 12``.
    """
    emitter = replayed.emitter
    aliases = [f"{alias} = {attribute}" for attribute, alias in emitter.aliases.items()]
    arguments = ", ".join(f"%arg{place}: {tensor}" for place, tensor in enumerate(emitter.arguments))
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
        "// A replay: the work of a graph in its order, not the program that the graph was taken from.",
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
