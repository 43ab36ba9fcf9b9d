"""Conversion of a parsed program to a workload."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial

from hespas.converters.format import ReadOptions
from hespas.converters.replica_groups import MAX_DEVICES, IdMode, highest_id
from hespas.converters.stablehlo import ATTACHMENT, BYTECODE_MAGIC
from hespas.converters.stablehlo.assembly import DeviceCounts, assemble
from hespas.converters.stablehlo.attributes import BufferLifetimes, CostAttributeReader
from hespas.converters.stablehlo.communication import Communication, CommunicationReader, ProgramCollective
from hespas.converters.stablehlo.functions import FunctionLibrary
from hespas.converters.stablehlo.mlir import (
    Bindings,
    MlirOperation,
)
from hespas.converters.stablehlo.module import ModuleHeader, call_sites, read_header
from hespas.converters.stablehlo.node_rows import LocationTable, SignatureTable
from hespas.converters.stablehlo.program import ParsedProgram, ProgramForm, undecodable_place
from hespas.converters.stablehlo.sharding import Shardings, global_nodes
from hespas.converters.stablehlo.template import FunctionTemplate
from hespas.converters.stablehlo.trips import TripCounter
from hespas.converters.stablehlo.types import TypeTable
from hespas.converters.stablehlo.walker import ModuleContext
from hespas.files.limits import without_collector
from hespas.graph import PROGRAM_BYTES, WHOLE_JOB, Diagnostics, Workload
from hespas.graph.columns import StringTableBuilder
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from hespas.graph.passes import materialise

__all__ = ["parsing", "read_parsed"]

_MAX_ATTACHED_TEXT = 8 << 20

_NEWLINE = b"\n"

_NO_CLASS = "incompatible function arguments"
"""Message of the bindings for a location in place of an attribute: they have no class for it."""

_SHARDING = b"sharding"

_LONGEST_REASON = 200


def read_parsed(
    data: bytes,
    parsed: ParsedProgram,
    bindings: Bindings,
    *,
    path: str,
    options: ReadOptions,
    diagnostics: Diagnostics,
) -> Workload:
    """Convert a parsed program to a workload. ``data`` is the program as bytes, for the graph's
    attachment.
    """
    with parsing(data, path), without_collector():
        return _read(data, parsed, bindings, path=path, options=options, diagnostics=diagnostics)


@contextmanager
def parsing(data: bytes, path: str) -> Generator[None]:
    """Convert errors of jaxlib's bindings in the ``with`` block to a ``FormatError``, with a position if
    possible.
    """
    try:
        yield
    except (RecursionError, RuntimeError, MemoryError, UnicodeDecodeError, TypeError) as error:
        finding = _stopped(error, data)
        if finding is None:
            raise
        finding.path = path
        raise finding from error
    except HespasError as error:
        error.path = error.path or path  # readers of single functions have no path
        raise


def _stopped(error: Exception, data: bytes) -> FormatError | None:
    """Return the ``FormatError`` for a failure of jaxlib's bindings or of the conversion. Return None if the
    failure is a bug in Hespas.
    """
    whole = f"within {len(data):,} bytes"
    is_text = BYTECODE_MAGIC not in data
    if isinstance(error, RecursionError):
        message, hint = (
            "types or regions nest too deep",
            "reduce the nesting: no compiler writes such programs",
        )
        return FormatError(message, position=whole, hint=hint)
    if isinstance(error, TypeError):
        if _NO_CLASS not in str(error):
            return None
        message = "a location is used in place of an attribute"
        hint = "remove the attribute: no compiler writes such programs"
        return FormatError(message, position=whole, hint=hint)
    position = undecodable_place(data) if is_text else ""
    if position:
        hint = "use UTF-8: only string attributes and names of functions may hold other bytes"
        return FormatError("a name or type is not UTF-8 text", position=position, hint=hint)
    if not isinstance(error, RuntimeError):
        return None
    # A lack of memory inside the bindings is reported like any of their other failures.
    lines = str(error).splitlines() or [""]
    reason = lines[-1 if lines[0].startswith("Traceback") else 0][:_LONGEST_REASON]
    message = f"jaxlib's bindings stop with {type(error).__name__}: {reason}"
    hint = "write or copy the file again"
    if is_text:
        hint = "remove types, attributes and locations that take gigabytes to print"
    return FormatError(f"a damaged program: {message}", position=whole, hint=hint)


def _read(
    data: bytes,
    parsed: ParsedProgram,
    bindings: Bindings,
    *,
    path: str,
    options: ReadOptions,
    diagnostics: Diagnostics,
) -> Workload:
    end = f"line {data.count(_NEWLINE) + 1}" if parsed.form is ProgramForm.TEXT else f"byte {len(data)}"
    stated_header = read_header(parsed.module, bindings, end)
    mesh_devices = max((mesh.mesh.num_devices for mesh in stated_header.meshes.values()), default=1)
    if (stated_header.num_replicas, stated_header.num_partitions) != (1, 1) or mesh_devices <= 1:
        header = stated_header
    else:  # JAX states 1 device for programs lowered on an abstract mesh without sharded arguments
        mesh_message = f"the module states 1 device, but its mesh has {mesh_devices:,}: using the mesh"
        diagnostics.warning("stablehlo.devices-of-mesh", path, mesh_message, path=path)
        header = stated_header._replace(num_partitions=mesh_devices)
    _check_devices(header, options)
    strings = StringTableBuilder()
    types = TypeTable(bindings, strings)
    library = FunctionLibrary(header, bindings)
    sites = cache(partial(call_sites, header, bindings))
    lifetimes = BufferLifetimes(header.donated, sites, header.entry)
    trips = TripCounter(bindings, header.body, sites)
    attributes = CostAttributeReader(bindings, types, lifetimes, header.body, trips)
    # Line numbers in bytecode refer to a text that is not available.
    own_lines = path if parsed.form is ProgramForm.TEXT else ""
    context = ModuleContext(
        path=path,
        strings=strings,
        types=types,
        signatures=SignatureTable(),
        attributes=attributes,
        communications=CommunicationReader(bindings, header.meshes),
        trips=trips,
        locations=LocationTable(strings, own_lines, enabled=options.locations and parsed.has_locations),
        diagnostics=diagnostics,
        function_template=library.template,
        is_replay=header.is_replay,
    )
    library.context = context
    entry = library.template(header.entry)
    devices = _devices(header, context.communications.rows, options, path, diagnostics)
    parts = _warn_if_global(data, header, entry, context, devices)
    is_long_text = parsed.form is ProgramForm.TEXT and len(data) > _MAX_ATTACHED_TEXT
    attachments = {ATTACHMENT: bindings.bytecode(parsed.module) if is_long_text else data}
    graph = materialise(assemble(header.name, entry, context, devices, attachments))
    metadata = {
        "format": "stablehlo",
        "form": parsed.form.value,
        "producer": parsed.producer,
        "num_replicas": str(devices.num_replicas),
        "num_partitions": str(devices.num_partitions),
        "ranks": header.ranks,
        WHOLE_JOB: str(parts or ""),
        PROGRAM_BYTES: header.program_bytes(types),
    }
    return Workload.spmd(graph, devices.num_devices, {key: value for key, value in metadata.items() if value})


def _check_devices(header: ModuleHeader, options: ReadOptions) -> None:
    """Raise ``UsageError`` if the requested numbers of devices or replicas contradict the module."""
    num_stated = max(header.num_replicas, 1) * max(header.num_partitions, 1)
    is_stated = bool(header.num_replicas or header.num_partitions)
    if options.num_devices is not None and is_stated and options.num_devices != num_stated:
        raise UsageError(
            f"{options.num_devices} devices requested, but the program runs on {num_stated}: "
            f"{max(header.num_replicas, 1)} replicas x {max(header.num_partitions, 1)} partitions",
            hint="omit the number of devices, or lower the program again for the other number",
        )
    replicas, devices = options.num_replicas, options.num_devices
    if replicas is not None and is_stated and replicas != max(header.num_replicas, 1):
        raise UsageError(
            f"{replicas} replicas requested, but the program states {max(header.num_replicas, 1)}",
            hint="omit the number of replicas, or lower the program again for the other number",
        )
    if replicas is not None and not is_stated and devices is not None and devices % replicas:
        raise UsageError(
            f"{devices} devices cannot be divided into {replicas} replicas of equal size",
            hint=f"choose `num_devices={-(-devices // replicas) * replicas}`",
        )
    if options.num_devices is not None and not 1 <= options.num_devices <= MAX_DEVICES:
        raise UsageError(f"{options.num_devices} devices requested", hint=f"choose 1 to {MAX_DEVICES:,}")


def _devices(
    header: ModuleHeader,
    communications: list[Communication],
    options: ReadOptions,
    path: str,
    diagnostics: Diagnostics,
) -> DeviceCounts:
    """Return the number of devices. The module states it, or else the options, or else it is inferred from
    the ids in collectives.

    Raises ``UnsupportedError`` for more than 2**24.
    """
    if header.num_replicas or header.num_partitions:
        devices = DeviceCounts(max(header.num_replicas, 1), max(header.num_partitions, 1))
        if devices.num_devices > MAX_DEVICES:
            raise UnsupportedError(
                f"{devices.num_devices:,} devices (limit {MAX_DEVICES:,})",
                position="module header",
                hint="correct mhlo.num_replicas and mhlo.num_partitions",
            )
        return devices
    count = options.num_devices
    if options.num_replicas is not None:
        named = count if count is not None else max(_named_devices(communications), options.num_replicas)
        return DeviceCounts(options.num_replicas, -(-named // options.num_replicas))
    if count is None:
        count = _named_devices(communications)
        if communications:
            message = f"the module does not state the number of devices; its collectives name {count}"
            diagnostics.warning("stablehlo.devices-inferred", path, message, path=path)
    partitioned = any(communication.mode is IdMode.CROSS_PARTITION for communication in communications)
    return DeviceCounts(1, count) if partitioned else DeviceCounts(count, 1)


def _named_devices(communications: list[Communication]) -> int:
    """Return the number of devices that the ids in groups and pairs imply: the largest id plus one."""
    highest = 0
    for communication in communications:
        if not isinstance(communication, ProgramCollective):
            highest = max(highest, *(rank for pair in communication.pairs or ((0, 0),) for rank in pair))
        else:
            highest = max(highest, highest_id(communication.groups))
    return highest + 1


def _warn_if_global(
    data: bytes, header: ModuleHeader, entry: FunctionTemplate, context: ModuleContext, devices: DeviceCounts
) -> int:
    """Warn if a program with shardings is not partitioned, because its shapes and costs are then those of all
    devices together.

    Return the number of shards into which the largest split would divide an operation, 0 for a partitioned
    program or one without shardings.
    """
    if _SHARDING not in data:
        return 0
    shardings, advance = Shardings(header.meshes), context.attributes.advance

    def visit(op: MlirOperation) -> object:
        shardings.note(op)
        return advance

    for function in header.functions.values():
        function.walk(visit)
    rows = context.signatures.rows
    nodes, parts = global_nodes(entry, rows, context.communications.rows, shardings)
    if not nodes:
        return 0
    flops = sum(rows[entry.signature[node]].cost.flops for node in nodes)
    which = ""
    if any(row.manual for row in entry.regions):
        which = f"of its {len(nodes)} operations outside of computations manual over all axes, "
    context.diagnostics.warning(
        "stablehlo.global-program",
        context.path,
        f"the program is sharded over {max(devices.num_partitions, parts)} partitions but not partitioned: "
        f"{which}shapes and costs count the whole job ({flops / 1e9:,.4g} GFLOP, loops once), "
        "without collectives. Partition it first with hespas-convert and `mesh=AXIS=N,...`",
        path=context.path,
    )
    return parts
