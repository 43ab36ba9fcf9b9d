"""Reads a StableHLO program, which every device runs, or a folder of the programs of rank classes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.replica_groups import MAX_DEVICES, IdMode, highest_id
from hespas.converters.stablehlo import BYTECODE_MAGIC, class_files
from hespas.converters.stablehlo.attributes import AttributeReader
from hespas.converters.stablehlo.communication import (
    Collective,
    Communication,
    CommunicationReader,
    Shardings,
    global_nodes,
)
from hespas.converters.stablehlo.dataflow import Lifetimes, TripCounter
from hespas.converters.stablehlo.mlir import Bindings, Operation, load_bindings
from hespas.converters.stablehlo.module import Frame, FunctionLibrary, call_sites, parsed_ranks, read_frame
from hespas.converters.stablehlo.program import Form, Parsed, parse_program, undecodable_place, with_dims
from hespas.converters.stablehlo.template import Devices, Template, assemble
from hespas.converters.stablehlo.types import Locations, Signatures, TypeTable
from hespas.converters.stablehlo.walker import Shared
from hespas.files.budget import parser_hint
from hespas.files.sandbox import ParserFailedError, parser_memory, parser_time, run_sandboxed
from hespas.files.streams import read_bytes
from hespas.graph import PROGRAM_BYTES, WHOLE_JOB, Diagnostics, GraphBuilder, OpGraph, Workload
from hespas.graph.columns import SmallIntArray, StringTableBuilder
from hespas.graph.errors import FormatError, HespasError, InvariantError, UnsupportedError, UsageError
from hespas.graph.passes import materialise

__all__ = ["Sandboxed", "parse_in_child", "parse_in_sandbox", "parsing", "read", "read_here", "read_program"]

_MAX_ATTACHED_TEXT = 8 << 20
_NEWLINE = b"\n"
_NO_CLASS = "incompatible function arguments"
"""What the bindings say of a location that is an attribute: they have no class for it."""
_SHARDING = b"sharding"
_LONGEST_REASON = 200


def read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file in any form or a folder. Raises ``FormatError``, ``UsageError`` or ``UnsupportedError``."""
    if path.is_dir():
        return _read_folder(path, options, diagnostics)
    return read_program(read_bytes(path, options.max_bytes), str(path), options, diagnostics)


def read_program(data: bytes, path: str, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a program from memory once a child process has survived it; ``path`` stands in messages."""
    load_bindings()  # without them there is nothing to try
    program = parse_in_sandbox(data, path, options)

    def parse(bindings: Bindings) -> Parsed:
        module = parse_program(program.bytecode, bindings).module
        return Parsed(module, Form(program.form), program.producer, program.has_locations)

    # A program whose dimensions were bound is another one than came.
    source = program.bytecode if options.dims else data
    return read_here(source, path, options, diagnostics, parse=parse)


def read_here(
    data: bytes,
    path: str,
    options: ReadOptions,
    diagnostics: Diagnostics,
    *,
    parse: Callable[[Bindings], Parsed],
) -> Workload:
    """Read a program that ``parse`` parses; ``data`` is the program as it came."""
    bindings = load_bindings()
    with parsing(data, path), _without_collector():
        parsed = parse(bindings)
        return _read(data, parsed, bindings, path=path, options=options, diagnostics=diagnostics)


@contextmanager
def parsing(data: bytes, path: str) -> Generator[None]:
    """What jaxlib's bindings raise within becomes a ``FormatError`` that says where, if it can."""
    try:
        yield
    except (RecursionError, RuntimeError, MemoryError, UnicodeDecodeError, TypeError) as error:
        finding = _stopped(error, data)
        if finding is None:
            raise
        finding.path = path
        raise finding from error
    except HespasError as error:
        error.path = error.path or path  # what works on one function does not know the file
        raise


def _stopped(error: Exception, data: bytes) -> FormatError | None:
    """What made jaxlib's bindings, or the walk over what they give, stop; None where the fault is ours."""
    whole = f"within {len(data):,} bytes"
    is_text = BYTECODE_MAGIC not in data
    if isinstance(error, RecursionError):
        message, hint = "types or regions nest too deep", "no compiler writes such programs"
        return FormatError(message, position=whole, hint=hint)
    if isinstance(error, TypeError):
        if _NO_CLASS not in str(error):
            return None
        message = "a location stands where an attribute should"
        hint = "no compiler writes such programs: leave the attribute out"
        return FormatError(message, position=whole, hint=hint)
    place = undecodable_place(data) if is_text else ""
    if place:
        hint = "bytes are read in strings of attributes and in names of functions only"
        return FormatError("a name or type is no text (UTF-8)", position=place, hint=hint)
    if not isinstance(error, RuntimeError):
        return None
    # What runs out of memory within their own frames comes out as any other failure of theirs.
    reason = (str(error).splitlines() or [""])[0][:_LONGEST_REASON]
    message = f"jaxlib's bindings stop with {type(error).__name__}: {reason}"
    hint = "write or copy the file again"
    if is_text:
        hint = "they do where a type, an attribute or a location takes gigabytes to print: leave it out"
    return FormatError(f"a damaged program: {message}", position=whole, hint=hint)


def _read(
    data: bytes,
    parsed: Parsed,
    bindings: Bindings,
    *,
    path: str,
    options: ReadOptions,
    diagnostics: Diagnostics,
) -> Workload:
    end = f"line {data.count(_NEWLINE) + 1}" if parsed.form is Form.TEXT else f"byte {len(data)}"
    frame = _on_its_mesh(read_frame(parsed.module, bindings, end), path, diagnostics)
    _check_devices(frame, options)
    strings = StringTableBuilder()
    types = TypeTable(bindings, strings)
    library = FunctionLibrary(frame, bindings)
    sites = cache(partial(call_sites, frame, bindings))
    lifetimes = Lifetimes(frame.donated, sites, frame.entry)
    trips = TripCounter(bindings, frame.body, sites)
    attributes = AttributeReader(bindings, types, lifetimes, frame.body, trips)
    # Lines that bytecode mentions are those of a text nobody has.
    own_lines = path if parsed.form is Form.TEXT else ""
    shared = Shared(
        path=path,
        strings=strings,
        types=types,
        signatures=Signatures(),
        attributes=attributes,
        communications=CommunicationReader(bindings, frame.meshes),
        trips=trips,
        locations=Locations(strings, own_lines, enabled=options.locations and parsed.has_locations),
        diagnostics=diagnostics,
        library=library,
        is_replay=frame.is_replay,
    )
    library.shared = shared
    entry = library.template(frame.entry)
    devices = _devices(frame, shared.communications.rows, options, path, diagnostics)
    parts = _warn_if_global(data, frame, entry, shared, devices)
    attachments = {"stablehlo": _attachment(data, parsed, bindings)}
    graph = materialise(assemble(frame.name, entry, shared, devices, attachments))
    metadata = {
        "format": "stablehlo",
        "form": parsed.form.value,
        "producer": parsed.producer,
        "num_replicas": str(devices.num_replicas),
        "num_partitions": str(devices.num_partitions),
        "ranks": frame.ranks,
        WHOLE_JOB: str(parts or ""),
        PROGRAM_BYTES: frame.program_bytes(types),
    }
    return Workload.spmd(graph, devices.num_devices, {key: value for key, value in metadata.items() if value})


def _attachment(data: bytes, parsed: Parsed, bindings: Bindings) -> bytes:
    """The program itself: as it came, or as bytecode where it is a long text."""
    is_long_text = parsed.form is Form.TEXT and len(data) > _MAX_ATTACHED_TEXT
    return bindings.bytecode(parsed.module) if is_long_text else data


@contextmanager
def _without_collector() -> Generator[None]:
    """No cyclic garbage arises while a program is read, and looking for it costs a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _on_its_mesh(frame: Frame, path: str, diagnostics: Diagnostics) -> Frame:
    """The frame with the devices of its mesh, where the module says 1: JAX does so where a program was
    lowered on an abstract mesh and no argument says how it is sharded.
    """
    parts = max((prod(extent for _, extent in mesh.axes) for mesh in frame.meshes.values()), default=1)
    if (frame.num_replicas, frame.num_partitions) != (1, 1) or parts <= 1:
        return frame
    message = f"the module says that 1 device runs it, and its mesh has {parts:,}: the mesh is believed"
    diagnostics.warning("stablehlo.devices-of-mesh", path, message, path=path)
    return frame._replace(num_partitions=parts)


def _check_devices(frame: Frame, options: ReadOptions) -> None:
    stated = max(frame.num_replicas, 1) * max(frame.num_partitions, 1)
    is_stated = bool(frame.num_replicas or frame.num_partitions)
    if options.num_devices is not None and is_stated and options.num_devices != stated:
        raise UsageError(
            f"{options.num_devices} devices asked for, but the program runs on {stated}: "
            f"{max(frame.num_replicas, 1)} replicas x {max(frame.num_partitions, 1)} partitions",
            hint="leave the number of devices to the program, or lower it again for the other number",
        )
    replicas, devices = options.num_replicas, options.num_devices
    if replicas is not None and is_stated and replicas != max(frame.num_replicas, 1):
        raise UsageError(
            f"{replicas} replicas asked for, but the program says {max(frame.num_replicas, 1)}",
            hint="leave the number of replicas to the program, or lower it again for the other number",
        )
    if replicas is not None and not is_stated and devices is not None and devices % replicas:
        raise UsageError(
            f"{devices} devices are no whole number of partitions of {replicas} replicas",
            hint=f"`num_devices={-(-devices // replicas) * replicas}`",
        )
    if options.num_devices is not None and not 1 <= options.num_devices <= MAX_DEVICES:
        raise UsageError(f"{options.num_devices} devices asked for", hint=f"1 to {MAX_DEVICES:,}")


def _devices(
    frame: Frame, stated: list[Communication], options: ReadOptions, path: str, diagnostics: Diagnostics
) -> Devices:
    """As the module says, else as asked for, else as many as its collectives name (with a diagnostic).

    Raises ``UnsupportedError`` past 2**24.
    """
    if frame.num_replicas or frame.num_partitions:
        devices = Devices(max(frame.num_replicas, 1), max(frame.num_partitions, 1))
        if devices.num_devices > MAX_DEVICES:
            raise UnsupportedError(
                f"{devices.num_devices:,} devices (limit {MAX_DEVICES:,})",
                position="module header",
                hint="correct mhlo.num_replicas and mhlo.num_partitions",
            )
        return devices
    count = options.num_devices
    if options.num_replicas is not None:
        named = count if count is not None else max(_named_devices(stated), options.num_replicas)
        return Devices(options.num_replicas, -(-named // options.num_replicas))
    if count is None:
        count = _named_devices(stated)
        if stated:
            message = f"the module does not say how many devices run it; its collectives name {count}"
            diagnostics.warning("stablehlo.devices-inferred", path, message, path=path)
    partitioned = any(communication.mode is IdMode.CROSS_PARTITION for communication in stated)
    return Devices(1, count) if partitioned else Devices(count, 1)


def _named_devices(communications: list[Communication]) -> int:
    """One more than the largest id in groups and pairs."""
    highest = 0
    for communication in communications:
        if not isinstance(communication, Collective):
            highest = max(highest, *(rank for pair in communication.pairs or ((0, 0),) for rank in pair))
        else:
            highest = max(highest, highest_id(communication.groups))
    return highest + 1


def _warn_if_global(data: bytes, frame: Frame, entry: Template, shared: Shared, devices: Devices) -> int:
    """Say where a sharded program is not partitioned: shapes there are those of the whole job. Returns into
    how many parts such work splits at most, 0 where there is none.
    """
    if _SHARDING not in data:
        return 0
    shardings, advance = Shardings(frame), shared.attributes.advance

    def visit(op: Operation) -> object:
        shardings.note(op)
        return advance

    for function in frame.functions.values():
        function.walk(visit)
    rows = shared.signatures.rows
    nodes, parts = global_nodes(entry, rows, shared.communications.rows, shardings)
    if not nodes:
        return 0
    flops = sum(rows[entry.signature[node]].cost.flops for node in nodes)
    which = ""
    if any(row.manual for row in entry.regions):
        which = f"of its {len(nodes)} operations outside of computations manual over all axes, "
    shared.diagnostics.warning(
        "stablehlo.global-program",
        shared.path,
        f"the program is sharded over {max(devices.num_partitions, parts)} partitions but not partitioned: "
        f"{which}shapes and costs are those of the whole job ({flops / 1e9:,.4g} GFLOP, loops once), and "
        "there are no collectives. Partition it first: hespas-convert does, with `mesh=AXIS=N,...`",
        path=shared.path,
    )
    return parts


# Reads a folder of replays, ``NAME.{class}.mlir``: the programs of one job's rank classes.

_PROGRAMS = (".mlir", ".mlir.gz", ".mlirbc", ".stablehlo", ".vhlo", ".bc")


def _read_folder(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """A workload of as many classes as there are programs; ranks of none run an empty graph.

    Raises ``UnsupportedError`` for a folder of other programs, ``FormatError`` for one without any, and where
    ranks are not as stated.
    """
    names = sorted(entry.name for entry in path.iterdir())
    files = class_files(names)
    if not files and not any(name.endswith(_PROGRAMS) for name in names):
        raise FormatError(
            "no StableHLO program is in this folder",
            path=str(path),
            position="the names of its files",
            hint=f"name a file, or keep programs there whose names end in {', '.join(_PROGRAMS)}",
        )
    if not files:
        raise UnsupportedError(
            "a folder of programs that do not say which ranks run them",
            path=str(path),
            position=f"file {next(name for name in names if name.endswith(_PROGRAMS))}",
            hint="read them one by one",
        )
    programs = {name: _program(path / name, options, diagnostics) for name in files.values()}
    rank_class = _rank_class(path, programs)
    classes = [program.classes[0] for program in programs.values()]
    if (idle := int((rank_class == len(classes)).sum())) > 0:
        message = "ranks whose program is not in the folder do nothing"
        diagnostics.warning("stablehlo.absent-ranks", path.name, message, path=str(path), count=idle)
        classes.append(_empty(path.name))
    first = next(iter(programs.values()))
    metadata = {key: value for key, value in first.metadata.items() if key not in {"ranks", PROGRAM_BYTES}}
    metadata["num_replicas"] = str(len(rank_class))
    return Workload(name=first.name, classes=tuple(classes), rank_class=rank_class, metadata=metadata)


def _program(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    return read_program(read_bytes(path, options.max_bytes), str(path), options, diagnostics)


def _rank_class(path: Path, programs: Mapping[str, Workload]) -> SmallIntArray:
    """The class of each rank; one past the last for ranks of no program."""
    num_ranks = max(program.num_ranks for program in programs.values())
    rank_class = np.full(num_ranks, len(programs), np.int32)
    for number, (name, program) in enumerate(programs.items()):
        stated = program.metadata.get("ranks", "")
        try:
            ranks = parsed_ranks(stated)
        except ValueError as error:
            raise _misfit(path / name, f"ranks = {stated[:80]!r}: {error}") from None
        if int(ranks.max()) >= num_ranks:
            raise _misfit(path / name, f"it is of rank {int(ranks.max())} of a job of {num_ranks}")
        taken = ranks[rank_class[ranks] < len(programs)]
        if len(taken):
            raise _misfit(path / name, f"rank {int(taken[0])} runs another program, too")
        rank_class[ranks] = number
    return rank_class


def _misfit(path: Path, message: str) -> FormatError:
    return FormatError(
        message,
        path=str(path),
        position="hespas.replay in the module header",
        hint="write the folder again, or read one program at a time",
    )


def _empty(name: str) -> OpGraph:
    return GraphBuilder(name).build()


# --- Programs are parsed, and read once, in a child process first: jaxlib's parsers crash on some damaged
# bytes, reserve gigabytes for others, and a few hundred bytes may stand for types, locations or numbers
# that take forever to print.
#
# A crash, a loop without end, or a want of memory there is a message here. What has survived comes back as
# bytecode that the child's MLIR has written: no byte of the input itself reaches a parser of this process.


class Sandboxed(msgspec.Struct, frozen=True):
    """A program that has been read: its form, as in :class:`~hespas.converters.stablehlo.program.Parsed`, and
    bytecode; or why it is none.
    """

    form: str = ""
    producer: str = ""
    has_locations: bool = False
    bytecode: bytes = b""
    error: tuple[str, str, str | None, str | None] | None = None
    """Class, message, position and remedy."""


_REFUSALS = {kind.__name__: kind for kind in (FormatError, UnsupportedError, UsageError)}


def parse_in_sandbox(data: bytes, path: str, options: ReadOptions) -> Sandboxed:
    """Read a program in a child process. Raises what its parser says of it, ``FormatError`` where the child
    crashes, hangs or wants memory out of all proportion, ``UnsupportedError`` where it does not start.

    What else is wrong with the program comes out when it is read here.
    """
    settings = msgspec.json.encode(
        (options.num_devices, options.num_replicas, options.locations, dict(options.dims))
    ).decode()
    try:
        answer = run_sandboxed(f"{__name__}:parse_in_child", data, "jaxlib's parser", settings)
    except ParserFailedError as error:
        is_binary = BYTECODE_MAGIC in data
        hint = "write or copy the file again" if is_binary else "no compiler writes such programs"
        hint = parser_hint(hint)
        raise FormatError(
            f"a damaged program: it {error}", path=path, position=f"within {len(data):,} bytes", hint=hint
        ) from None
    found = msgspec.msgpack.decode(answer, type=Sandboxed)
    if found.error is not None:
        kind, message, position, remedy = found.error
        raise _REFUSALS[kind](message, path=path, position=position, hint=remedy)
    return found


def parse_in_child(data: bytes, parser_bytes: int, settings: str) -> bytes:
    """In the child: a :class:`Sandboxed`. The parser gets ``parser_bytes`` of memory; then the program is
    read as it will be outside, so that what that takes is bounded too.
    """
    num_devices, num_replicas, locations, dims = msgspec.json.decode(
        settings, type=tuple[int | None, int | None, bool, dict[str, int]]
    )
    bindings = load_bindings()
    try:
        with parsing(data, ""), parser_memory(parser_bytes), parser_time(len(data)):
            parsed = parse_program(data, bindings)
            if dims:
                parsed = parsed._replace(module=with_dims(parsed.module, dims, bindings), form=Form.BYTECODE)
    except InvariantError:
        raise
    except HespasError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return _refusal(error)
    options = ReadOptions(num_devices=num_devices, num_replicas=num_replicas, locations=locations)
    bytecode = bindings.bytecode(parsed.module)
    try:
        read_here(data, "-", options, Diagnostics(), parse=lambda bindings: parsed)
    except HespasError as error:  # is reported, with all that comes before it, when it is read for good
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, RuntimeError):  # memory that ran out here, and would not there
            return _refusal(error)
    return msgspec.msgpack.encode(
        Sandboxed(parsed.form.value, parsed.producer, parsed.has_locations, bytecode)
    )


def _refusal(error: HespasError) -> bytes:
    fields = (type(error).__name__, error.message, error.position, error.hint)
    return msgspec.msgpack.encode(Sandboxed(error=fields))
