"""Reader of optimised or unoptimised HLO as a :class:`~hespas.graph.Workload`.

Text is read without jaxlib; a serialised ``HloModuleProto`` is printed as text by jaxlib first. If the header
lacks the number of devices, it is taken from the options or inferred from the largest id in the collectives,
with a diagnostic. The mode of a collective determines if its ids are replicas or partitions. XLA does not
print a count of one, and modules from a proto or from StableHLO have no counts.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hespas.converters.format import ReadOptions
from hespas.converters.hlo.attributes import (
    PAIRS_KEY,
    callee_names,
    frontend_pairs,
    header_meshes,
    int_rows,
    integer,
    is_true,
    names,
    parse_groups,
)
from hespas.converters.hlo.bodies import STRUCTURE, Bodies
from hespas.converters.hlo.communication import Communication, HloFindings, NodeEmitter
from hespas.converters.hlo.inference_calls import check_shapes
from hespas.converters.hlo.lower import GraphLowering
from hespas.converters.hlo.module import Computation, HloModule
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.program import HloProgram, base_opcode
from hespas.converters.hlo.scan import HloText, is_text, module_bytes, proto_to_text, shown, unquote
from hespas.converters.replica_groups import MAX_DEVICES, IdMode, group_mode
from hespas.costs.payloads import COLLECTIVE_KINDS
from hespas.costs.table import canonical_name
from hespas.files.streams import read_bytes
from hespas.graph import PROGRAM_BYTES, WHOLE_JOB, Diagnostics, ExplicitGroups, Workload
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.graph.passes import materialise

__all__ = ["callees_first", "device_count", "read_hlo", "read_module", "source_of", "workload_of"]

_LIMIT_HINT = "convert a smaller program, or let XLA inline its calls first (--xla_dump_to after passes)"
_FAULT_HINT = "dump the module again; XLA itself does not print such an instruction"
_HINT = "give the text or the .pb that --xla_dump_to writes"


def read_hlo(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read an HLO file as a workload. Raises ``FormatError``, ``UnsupportedError``, and ``MissingExtraError``
    for a proto if jaxlib is missing.
    """
    return read_module(read_bytes(path, options.max_bytes), str(path), options, diagnostics)


def read_module(
    data: bytes, path: str, options: ReadOptions, diagnostics: Diagnostics, *, in_order: bool = False
) -> Workload:
    """Read an HLO module from memory as a workload. ``path`` names the module in messages. ``in_order`` has
    the same meaning as in :func:`workload_of`. Raises the errors of :func:`read_hlo`.
    """
    module = parse_module(source_of(data, path))
    try:
        return workload_of(module, options, diagnostics, in_order=in_order)
    except FormatError as error:
        error.hint = error.hint or _FAULT_HINT
        raise
    except UnsupportedError as error:
        error.hint = error.hint or _LIMIT_HINT
        raise


def source_of(data: bytes, path: str) -> HloText:
    """Return the text of a module in any form. Raises ``FormatError`` for other bytes."""
    data = data.removeprefix(BOM_UTF8)
    if is_text(data):
        try:
            return HloText(data.decode("utf-8"), path)
        except UnicodeDecodeError as error:
            raise FormatError(
                f"expected UTF-8 text: {error.reason}", path=path, position=f"byte {error.start}", hint=_HINT
            ) from error
    module = module_bytes(data)
    if module is not None:
        return HloText(proto_to_text(module, path), path, origin="module printed as text, ")
    raise FormatError(
        "expected 'HloModule' or a serialised HloModuleProto",
        path=path,
        position="line 1, byte 0",
        hint=_HINT,
    )


def workload_of(
    module: HloModule, options: ReadOptions, diagnostics: Diagnostics, *, in_order: bool = False
) -> Workload:
    """Convert a parsed module to a workload with one graph for all devices. O(inlined instructions).

    ``in_order`` means that the device runs compute instructions one after another in text order, which is the
    schedule of XLA for GPUs and TPUs. Control dependencies then chain these instructions. XLA for CPUs runs
    any instruction that is ready.
    """
    ordered = callees_first(module)
    if not module.marked and len(module.computations) > 1:
        diagnostics.warning(
            "hlo.no-entry",
            module.name,
            f"no computation is marked ENTRY; the last one, {module.entry.name}, is used, as in XLA",
            path=module.source.path,
        )
    program = HloProgram(module)
    check_shapes(program, ordered)
    _shorten_async(module.computations)
    _check_inlined_size(module, ordered)
    replicas, partitions = _device_counts(module, options, diagnostics)
    # Whether a program is sharded but not partitioned, and say so: its shapes are those of the whole job.
    if partitions < 2 or not _is_global(module):
        is_global = False
    else:
        diagnostics.warning(
            "hlo.global-program",
            module.name,
            f"the program is sharded over {partitions} partitions but not partitioned: shapes and costs are "
            "those of the whole job, counted on each device. Read the optimised HLO instead "
            "(--xla_dump_hlo_as_text writes it after the passes)",
            path=module.source.path,
        )
        is_global = True
    bodies = Bodies(program)
    for computation in ordered[:-1]:
        bodies.add(computation)
    findings = HloFindings(program)
    emitter = NodeEmitter(program, findings, locations=options.locations)
    communication = Communication(emitter, replicas, partitions)
    GraphLowering(emitter, bodies, communication, in_order=in_order).run()
    findings.report(diagnostics)
    for key, value in module.attributes.items():
        emitter.builder.add_extra(-1, key, 0, value.encode("utf-8", "surrogatepass"))
    graph = emitter.builder.build()
    if not program.is_scheduled:  # what a compiler left as an operation of its own has its cost by its rule
        graph = materialise(graph)
    metadata = {
        "format": "hlo",
        "module": module.name,
        "entry": module.entry.name,
        "is_scheduled": module.attributes.get("is_scheduled", "false"),
        "num_replicas": str(replicas),
        "num_partitions": str(partitions),
        "num_computations": str(len(module.computations)),
        "num_instructions": str(module.num_instructions),
        **({WHOLE_JOB: str(partitions)} if is_global else {}),
    }
    if not program.is_scheduled:  # parameters of a scheduled one stay nodes
        metadata[PROGRAM_BYTES] = program.program_bytes()
    return Workload.spmd(
        graph, communication.num_devices, {key: value for key, value in metadata.items() if value}
    )


_KEPT_LONG = frozenset({"while", "conditional", "call", "async-start"})


def _shorten_async(computations: Mapping[str, Computation]) -> None:
    """Replace every ``async-start`` of a single operation by the equivalent ``OPERATION-start``. XLA prints
    most asynchronous operations in that form. O(instructions).
    """
    wrapped = {name: root for name, body in computations.items() if (root := _single_operation(body)) >= 0}
    if not wrapped:
        return
    for computation in computations.values():
        for index, opcode in enumerate(computation.opcodes):
            if opcode != "async-start":
                continue
            named = names(computation.attributes[index].get("calls"))
            if named and named[0] in wrapped:
                _shorten(computation, index, computations[named[0]], wrapped[named[0]])


def _single_operation(body: Computation) -> int:
    """Return the instruction number of the root if the root is the only operation of a computation and reads
    only parameters. Otherwise return -1.
    """
    work = [index for index, opcode in enumerate(body.opcodes) if opcode not in STRUCTURE]
    if work != [body.root] or body.opcodes[body.root] in _KEPT_LONG:
        return -1
    reads_parameters = all(body.opcodes[operand] == "parameter" for operand in body.operands[body.root])
    return body.root if reads_parameters else -1


def _shorten(computation: Computation, index: int, body: Computation, root: int) -> None:
    given = computation.operands[index]
    try:
        numbers = [integer(body.payloads[operand]) for operand in body.operands[root]]
    except ValueError:
        return
    if any(not 0 <= number < len(given) for number in numbers):
        return
    own = {key: value for key, value in computation.attributes[index].items() if key != "calls"}
    computation.opcodes[index] = f"{body.opcodes[root]}-start"
    computation.operands[index] = tuple(given[number] for number in numbers)
    computation.attributes[index] = body.attributes[root] | own


_COUNTS = ("replica_count", "num_partitions")
_PARTITIONER_CALLS = frozenset(
    {
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "xla.sdy.FuncResultSharding",
        "xla.sdy.GlobalToLocalShape",
        "xla.sdy.LocalToGlobalShape",
    }
)
"""Targets of custom calls for the partitioner, which removes all of them."""

_MESSAGES = frozenset({"collective-permute", "send", "recv"})
_NAMED_IN = ("replica_groups", "source_target_pairs", "frontend_attributes")
_NAMING = frozenset({"channel_id", *_NAMED_IN})
_TO_SHARD = "SPMDFullToShardShape"
_STRUCTURE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape"})
_TILED = ("devices=", "mesh", "<=[")
_MADE_BY_PARTITIONER = "_spmd"
"""Suffix that XLA's partitioner adds to the names of computations."""


@dataclass(slots=True)
class _NamedIds:
    """Smallest numbers of replicas, partitions, devices and message peers for which all ids in collectives
    are valid: one more than the largest id of each kind. ``channels`` is True if a collective runs across
    partitions. ``over_all`` is True if a collective has an empty list of groups, which means all devices.
    """

    replicas: int = 1
    partitions: int = 1
    devices: int = 1
    peers: int = 1
    channels: bool = False
    over_all: bool = False


def device_count(module: HloModule) -> int:
    """Return the number of devices from the header or, if it has none, from the ids in collectives. Raises
    ``UnsupportedError`` beyond the limit.
    """
    replicas, partitions = _device_counts(module, ReadOptions(), Diagnostics())
    return replicas * partitions


def _device_counts(module: HloModule, options: ReadOptions, diagnostics: Diagnostics) -> tuple[int, int]:
    """Return the numbers of replicas and partitions of the program. Raises ``FormatError`` for invalid
    numbers, and ``UnsupportedError`` for more than 2**24 devices.
    """
    header_counts = _stated_counts(module, options, diagnostics)
    replicas, partitions = (
        1 if header_counts[0] is None else header_counts[0],
        1 if header_counts[1] is None else header_counts[1],
    )
    wanted = options.num_devices
    if None in header_counts:
        named = _named_ids(module, complete=header_counts != [None, None])
        replicas, partitions = _grown(
            (replicas, partitions), (header_counts[0] is None, header_counts[1] is None), named
        )
        inferred = replicas * partitions > (header_counts[0] or 1) * (header_counts[1] or 1)
        if wanted is not None and header_counts == [None, None]:
            # Split the requested number of devices into replicas and partitions.
            if replicas > 1 and partitions > 1:
                replicas, partitions = (
                    (replicas, wanted // replicas) if wanted % replicas == 0 else (replicas, partitions)
                )
            elif replicas > 1 or (partitions == 1 and not named.channels):
                replicas, partitions = wanted, 1
            else:
                replicas, partitions = 1, wanted
        elif wanted is None and replicas * partitions == 1 and named.over_all:
            diagnostics.warning(
                "hlo.unknown-devices",
                module.name,
                "the collectives run over all devices, but the number of devices is unknown: one is assumed, "
                "so collectives take almost no time. Set the number with `num_devices`",
                path=module.source.path,
            )
        elif wanted is None and inferred:
            diagnostics.warning(
                "hlo.inferred-devices",
                module.name,
                f"the module has no number of devices; its collectives imply {replicas * partitions}"
                + (
                    f" ({replicas} replicas of {partitions} partitions)"
                    if min(replicas, partitions) > 1
                    else ""
                ),
                path=module.source.path,
            )
    if wanted is not None and wanted != replicas * partitions:
        diagnostics.warning(
            "hlo.num-devices",
            module.name,
            f"the module is for {replicas * partitions} devices; the requested {wanted} are ignored",
            path=module.source.path,
        )
    if replicas * partitions > MAX_DEVICES:
        raise UnsupportedError(
            f"{replicas * partitions:,} devices (limit {MAX_DEVICES:,})",
            path=module.source.path,
            position="module header",
            hint="state the replica_count and num_partitions of one job",
        )
    return replicas, partitions


def _stated_counts(module: HloModule, options: ReadOptions, diagnostics: Diagnostics) -> list[int | None]:
    """Return the numbers of replicas and partitions that the header states, None if absent. ``options`` may
    state the number of replicas or of devices.

    Raises ``UsageError`` if the replicas do not divide the requested number of devices.
    """
    header_counts = [_count(module, key) if key in module.attributes else None for key in _COUNTS]
    replicas, wanted = options.num_replicas, options.num_devices
    if replicas is None:
        return header_counts
    if header_counts[0] not in {None, replicas}:
        diagnostics.warning(
            "hlo.num-replicas",
            module.name,
            f"the module is for {header_counts[0]} replicas; the requested {replicas} are ignored",
            path=module.source.path,
        )
        return header_counts
    if wanted is not None and header_counts[1] is None:
        if wanted % replicas:
            raise UsageError(
                f"{wanted} devices cannot be divided into {replicas} replicas",
                path=module.source.path,
                hint=f"use `num_devices={-(-wanted // replicas) * replicas}`",
            )
        header_counts[1] = wanted // replicas
    return [replicas, header_counts[1]]


def _grown(counts: tuple[int, int], free: tuple[bool, bool], named: _NamedIds) -> tuple[int, int]:
    """Return the numbers of replicas and partitions, increased until every id in a collective is valid.
    ``counts`` are the numbers so far. ``free`` states for each of them if it may be increased.
    """
    replicas, partitions = counts
    replicas = max(replicas, named.replicas) if free[0] else replicas
    partitions = max(partitions, named.partitions) if free[1] else partitions
    if named.peers > (replicas if partitions == 1 else partitions):  # as messages are resolved
        if partitions > 1 and free[1]:
            partitions = named.peers
        elif partitions == 1 and free[0]:
            replicas = named.peers
    if named.devices > replicas * partitions and all(free):  # with a stated count XLA rejects such ids
        partitions = -(-named.devices // replicas)
    return replicas, partitions


def _count(module: HloModule, key: str) -> int:
    try:
        number = integer(module.attributes.get(key, "1"))
    except ValueError as error:
        raise module.source.error(0, f"{key} to be a number: {error}") from error
    if number < 1:
        raise module.source.error(0, f"{key} to be at least 1, not {number}")
    return number


def _named_ids(module: HloModule, *, complete: bool) -> _NamedIds:
    """Return the numbers of devices that the ids in all collectives require. Malformed groups are ignored
    here and reported later. With ``complete``, groups that do not contain all ids are also ignored, because
    XLA rejects them.
    """
    named = _NamedIds()
    seen: set[tuple[str | None, ...]] = set()
    for body in module.computations.values():
        for opcode, given in zip(body.opcodes, body.attributes, strict=True):
            if given.get("replica_groups", "{}") == "{}" and canonical_name(opcode) in COLLECTIVE_KINDS:
                named.over_all = True
            if _NAMING.isdisjoint(given):
                continue
            channel = given.get("channel_id")
            named.channels |= channel is not None
            for key in _NAMED_IN:
                text = given.get(key)
                if text is None or (key == "frontend_attributes" and PAIRS_KEY not in text):
                    continue
                spelling = (base_opcode(opcode)[0], key, text, channel, given.get("use_global_device_ids"))
                if spelling not in seen:
                    seen.add(spelling)
                    _add_ids(module, named, spelling[0], key, given, complete=complete)
    return named


def _add_ids(
    module: HloModule, named: _NamedIds, opcode: str, key: str, given: Mapping[str, str], *, complete: bool
) -> None:
    """Record the largest id in attribute ``key`` of a collective. By its mode, it is the id of a replica, a
    partition, a device or a message peer.
    """
    if key == "frontend_attributes":
        pairs = frontend_pairs(given) or ""
        named.peers = max(named.peers, _named(module, "source_target_pairs", pairs, complete=False))
        return
    number = _named(module, key, given[key], complete=complete)
    try:
        channel = integer(given.get("channel_id", "-1"))
        flat = is_true(given.get("use_global_device_ids"))
        mode = group_mode(canonical_name(opcode), channel, use_global_device_ids=flat)
    except ValueError:
        return
    if mode is IdMode.FLATTENED_IDS:
        named.devices = max(named.devices, number)
    elif mode is IdMode.CROSS_PARTITION:
        named.partitions = max(named.partitions, number)
    else:
        named.replicas = max(named.replicas, number)


def _named(module: HloModule, key: str, text: str, *, complete: bool) -> int:
    try:
        if key == "source_target_pairs":
            return max((rank for row in int_rows(text) for rank in row), default=0) + 1
        groups = parse_groups(text, MAX_DEVICES, header_meshes(module.attributes))
    except ValueError:
        return 1
    if groups is None:
        return 1
    if isinstance(groups, ExplicitGroups):
        highest = max((rank for row in groups.rows for rank in row), default=0) + 1
    else:
        highest = groups.base + groups.num_ranks
    return highest if not complete or groups.num_ranks == highest else 1


def _is_global(module: HloModule) -> bool:
    """Return True if the module has not been partitioned. Such a module calls the partitioner, or has
    shardings but no communication. In a partitioned program only parameters and results have shardings. A
    compiled program is partitioned: it has a schedule, and the partitioner has renamed its entry.
    """
    if module.entry.name.endswith(_MADE_BY_PARTITIONER):
        return False
    opcodes: set[str] = set()
    for body in module.computations.values():
        opcodes.update(body.opcodes)
    if "custom-call" in opcodes and any(
        opcode == "custom-call" and unquote(given.get("custom_call_target", "")) in _PARTITIONER_CALLS
        for body in module.computations.values()
        for opcode, given in zip(body.opcodes, body.attributes, strict=True)
    ):
        return not _works_by_hand_only(module)
    exchanges = any(
        base in _MESSAGES or canonical_name(base) in COLLECTIVE_KINDS
        for base in (base_opcode(opcode)[0] for opcode in opcodes)
    )
    scheduled = module.attributes.get("is_scheduled") == "true"
    if "sharding=" not in module.source.text or (scheduled and exchanges):
        return False
    tiled = inner = False
    for body in module.computations.values():
        for index, given in enumerate(body.attributes):
            sharding = given.get("sharding", "")
            if sharding and any(mark in sharding for mark in _TILED):
                tiled = True
                inner |= body.opcodes[index] not in {"parameter", "tuple"} and index != body.root
    return inner or (tiled and not exchanges and not scheduled)


def _works_by_hand_only(module: HloModule) -> bool:
    """Return True if all work of the program is inside ``shard_map``. Its shapes are then those of one device
    although the program is sharded.
    """
    open_, seen = [module.entry], {module.entry.name}
    while open_:
        body = open_.pop()
        targets = [unquote(given.get("custom_call_target", "")) for given in body.attributes]
        for index, opcode in enumerate(body.opcodes):
            if opcode in _STRUCTURE or (opcode == "custom-call" and targets[index] in _PARTITIONER_CALLS):
                continue
            if opcode != "call":
                return False
            if any(targets[operand] == _TO_SHARD for operand in body.operands[index]):
                continue
            for name in names(body.attributes[index].get("to_apply", "")):
                callee = module.computations.get(name)
                if callee is not None and name not in seen:
                    seen.add(name)
                    open_.append(callee)
    return True


_ON_PATH, _DONE = 1, 2
_MAX_INLINED_NODES = 20_000_000
_MAX_TUPLE_USES = 1 << 24
_MAX_FUSED_OPERATIONS = 4_000_000
"""Limit for all fusions together; compilers make one computation per fusion."""

_SCALAR_BODIES = frozenset({"reduce", "sort", "map", "scatter"})


def _callees(module: HloModule, computation: Computation) -> list[Computation]:
    callees: list[Computation] = []
    for index, attributes in enumerate(computation.attributes):
        for name in callee_names(attributes) if attributes else ():
            callee = module.computations.get(name)
            if callee is None:
                raise module.source.error(
                    computation.positions[index], f"a computation of this module; {shown(name)} is not one"
                )
            callees.append(callee)
    return callees


def callees_first(module: HloModule) -> list[Computation]:
    """Sort the computations that the entry reaches, callees first. No recursion; O(instructions).

    Raises ``FormatError`` for an unknown computation and for a computation that calls itself.
    """
    entry = module.entry
    state = {entry.name: _ON_PATH}
    ordered: list[Computation] = []
    stack = [(entry, iter(_callees(module, entry)))]
    while stack:
        computation, rest = stack[-1]
        callee = next(rest, None)
        if callee is None:
            stack.pop()
            state[computation.name] = _DONE
            ordered.append(computation)
        elif callee.name not in state:
            state[callee.name] = _ON_PATH
            stack.append((callee, iter(_callees(module, callee))))
        elif state[callee.name] == _ON_PATH:
            raise module.source.error(callee.position, f"no recursion, but {shown(callee.name)} calls itself")
    return ordered


def _check_inlined_size(module: HloModule, ordered: list[Computation]) -> None:
    """Raise ``UnsupportedError`` for a module that would be too large after inlining. Nodes of calls,
    operations of fusions, and values in tuples are limited. O(instructions).
    """
    nodes: dict[str, int] = {}
    fused: dict[str, int] = {}
    uses: dict[str, int] = {}
    values = {row: shape.values for row, shape in enumerate(module.shapes) if shape.array is None}
    tuple_values = 0
    for computation in ordered:
        made, inside, used = len(computation), 0, _tuple_uses(computation, values)
        tuple_values += used
        for opcode, attributes in zip(computation.opcodes, computation.attributes, strict=True):
            if not attributes or opcode in _SCALAR_BODIES:
                continue
            for name in callee_names(attributes):
                if opcode == "fusion":
                    inside += nodes[name] + fused[name]
                else:
                    made += nodes[name]
                    used += uses[name]
                    inside += fused[name]
        nodes[computation.name], fused[computation.name], uses[computation.name] = made, inside, used
    _check_limit(module, "calls", nodes[module.entry.name], _MAX_INLINED_NODES)
    _check_limit(module, "fusions", fused[module.entry.name], _MAX_FUSED_OPERATIONS)
    most = max(tuple_values, uses[module.entry.name])
    if most > _MAX_TUPLE_USES:
        raise UnsupportedError(
            f"tuples of instructions with {most:,} values in total (limit {_MAX_TUPLE_USES:,})",
            path=module.source.path,
            position=f"computation {shown(module.entry.name)}",
            hint="check the tuple types of the program",
        )


def _tuple_uses(computation: Computation, values: Mapping[int, int]) -> int:
    """Return the number of values in the tuples that instructions produce and read, except through
    ``get-tuple-element``.
    """
    made = {index: values[row] for index, row in enumerate(computation.shapes) if row in values}
    if not made:
        return 0
    return sum(made.values()) + sum(
        made.get(operand, 0)
        for opcode, operands in zip(computation.opcodes, computation.operands, strict=True)
        if opcode != "get-tuple-element"
        for operand in operands
    )


def _check_limit(module: HloModule, what: str, total: int, limit: int) -> None:
    if total > limit:
        raise FormatError(
            f"{total:,} operations after inlining its {what} (limit {limit:,})",
            path=module.source.path,
            position=f"computation {shown(module.entry.name)}",
            hint="convert a smaller program, or compile it with fewer repeated calls",
        )
