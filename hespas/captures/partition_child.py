"""Child process that runs XLA's SPMD partitioner for any number of devices on a host with one CPU device.

The child asks XLA's CPU compiler for an executable of N partitions, all assigned to the one CPU device. XLA
propagates shardings (Shardy or GSPMD), partitions, dumps the partitioned module (``xla_dump_hlo_pass_re``),
and continues to code generation, which is not needed: the parent stops the process at that point.

No CPU-specific pass has changed the module yet: numbers keep their formats, collectives are as the
partitioner made them, and groups are meshes or iotas, so that the cost does not depend on the number of
devices.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from hespas.converters.stablehlo.communication import COMMUNICATION, read_mesh
from hespas.converters.stablehlo.mlir import Bindings, MlirModule, MlirOperation, load_bindings
from hespas.converters.stablehlo.program import parse_program
from hespas.files.processes import encode_error
from hespas.files.sandbox import bounded_memory
from hespas.graph.errors import FormatError, HespasError, InvariantError, UnsupportedError, UsageError
from hespas.graph.mesh import Mesh

__all__ = ["PARTITIONED", "REFUSED", "PartitionSettings", "main"]

PARTITIONED = ("after_spmd-partitioning", "sharding-removal.after_dce")
"""Parts of the name of the wanted dump; the second is for programs of one device."""

REFUSED = "refused.json"
"""File with the reason why a program cannot be partitioned."""

_DUMPED_PASSES = ("^(spmd-partitioning|pipeline-start)$", "^(dce|pipeline-start)$")
"""Passes to dump after: the partitioner (on one device, the removal of annotations), and the start of each
pipeline, because a file of the next pipeline proves that the wanted one is complete.
"""

_MEMORY_BYTES, _MEMORY_PER_BYTE = 8 << 30, 2_000
_SHARDING = "mhlo.sharding"
_SHARDINGS = ("sdy.sharding", _SHARDING)
_FRONTEND = "mhlo.frontend_attributes"
_CUSTOM_PARTITIONING = "CustomSPMDPartitioning"
_COLLECTIVES = frozenset(f"stablehlo.{name}" for name in COMMUNICATION - {"send", "recv"})
_COUNT = re.compile(r"([1-9][0-9]{0,17})(?: : [su]?i[0-9]+)?")
_PROTOBUF_START = b"\x08"
"""First byte of a sharding in protobuf form: the tag of its type."""
_MAX_INLINED = 4_000_000
"""Limit on the operations of a program after XLA has inlined its calls."""


class PartitionSettings(NamedTuple):
    """Options of the child process that partitions a program.

    ``axes`` are the sizes of mesh axes by name; if it is empty, the sizes stay as in the program. ``shardy``
    selects Shardy for the propagation of shardings, otherwise GSPMD.
    """

    program: str
    folder: str
    axes: dict[str, int]
    shardy: bool


def main() -> int:
    """Partition a program in the child process, and write the results to a folder. The only argument is a
    :class:`PartitionSettings` as JSON.
    """
    settings = PartitionSettings(**json.loads(sys.argv[1]))
    os.environ["XLA_FLAGS"] = ""
    data = Path(settings.program).read_bytes()
    try:
        with bounded_memory(_MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)):
            bindings = load_bindings()
            module = parse_program(data, bindings).module
            with cast("Any", module).context:
                program = _AnnotatedProgram(module, bindings)
                devices = program.set_mesh(settings.axes)
                program.check(devices)
                # XLA writes the requested dump before the executable is complete.
                jax: ModuleType = import_module("jaxlib._jax")
                client: Any = jax.get_tfrt_cpu_client(asynchronous=False, num_devices=1)
                (device,) = client.devices()
                options: Any = jax.CompileOptions()
                build = options.executable_build_options
                build.num_replicas, build.num_partitions = 1, devices
                build.use_spmd_partitioning, build.use_shardy_partitioner = True, settings.shardy
                build.allow_spmd_sharding_propagation_to_parameters = program.unsharded("arg_attrs")
                build.allow_spmd_sharding_propagation_to_output = program.unsharded("res_attrs")
                build.device_assignment = jax.DeviceAssignment.create(
                    np.full((1, devices), device.id, np.int32)
                )
                debug = build.debug_options
                debug.xla_dump_to, debug.xla_dump_hlo_as_text = settings.folder, True
                debug.xla_dump_hlo_pass_re = _DUMPED_PASSES[devices == 1]
                client.compile_and_load(program.module, jax.DeviceList((device,)), options)
                raise InvariantError("XLA has compiled a program that should have been stopped before")
    except HespasError as error:
        refusal: Mapping[str, str] = encode_error(error)
    except MemoryError:
        refusal = {"kind": "XLA", "message": "it needs more memory than the limit for a program of this size"}
    except RuntimeError as error:
        refusal = {"kind": "XLA", "message": str(error)}
    Path(settings.folder, REFUSED).write_text(json.dumps(refusal), encoding="utf-8")
    return 1


class _AnnotatedProgram:
    """StableHLO module with sharding annotations of Shardy or GSPMD."""

    def __init__(self, module: MlirModule, bindings: Bindings) -> None:
        self.module, self._bindings = module, bindings
        self._operations: list[MlirOperation] = []

        def visit(op: MlirOperation) -> object:
            self._operations.append(op)
            return bindings.ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        self.entry = next(
            (op for op in self._operations if op.name == "func.func" and _symbol_name(op) == "main"), None
        )

    def set_mesh(self, axes: Mapping[str, int]) -> int:
        """Set the axis sizes of the program's meshes and return the number of devices. Empty ``axes`` change
        nothing.

        Raises ``UsageError`` if the program has other axes, or if its shapes depend on the sizes.
        """
        mesh_ops = [op for op in self._operations if op.name == "sdy.mesh"]
        meshes = {_symbol_name(op): read_mesh(op.attributes["mesh"], self._bindings.sdy) for op in mesh_ops}
        meshes = {name: mesh for name, mesh in meshes.items() if mesh.mesh.names}
        counts: list[int] = []
        for attribute in ("mhlo.num_partitions", "mhlo.num_replicas"):
            attributes = self.module.operation.attributes
            text = str(attributes[attribute]) if attribute in attributes else "1"
            match = _COUNT.fullmatch(text)
            if match is None:
                raise FormatError(
                    f"{attribute} is {text[:80]}, which is not a number of devices",
                    hint="lower the program again",
                )
            counts.append(int(match[1]))
        partitions, replicas = counts
        if replicas > 1:
            raise UnsupportedError(
                f"the program is for {replicas} replicas (pmap) of {partitions} partitions each",
                hint="write it with jax.jit and a mesh that has an axis for the replicas",
            )
        if not meshes:
            # A program without a mesh has tiled shardings, or none at all.
            if partitions == 1 and axes and prod(axes.values()) == 1:
                return 1
            if partitions <= 1:
                raise UsageError(
                    "the program has neither a mesh nor shardings: every device would run all of it",
                    hint="lower it with sharded arguments (jax.sharding.NamedSharding), or constrain "
                    "values within it (jax.lax.with_sharding_constraint)",
                )
            if axes and prod(axes.values()) != partitions:
                raise UsageError(
                    f"the program is sharded in tiles over {partitions} devices, but the mesh "
                    f"{_axes_text(axes)} has {prod(axes.values())}",
                    hint="lower the program for the other mesh, because tiles have no axes to resize",
                )
            return _checked_devices(partitions)
        own_axes = [mesh.mesh.axes for mesh in meshes.values()]
        current = next((sizes for sizes in own_axes if set(sizes) == set(axes)), own_axes[0])
        if axes and list(axes) != list(current):
            raise UsageError(
                f"the mesh axes of the program are {_axes_text(current)}, not {_axes_text(axes)}",
                hint="name the axes of the program, in its order, with their new sizes",
            )
        wanted = {name: axes.get(name, size) for name, size in current.items()}
        changed = {name for name in current if wanted[name] != current[name]}
        if not changed:
            return _checked_devices(max(prod(wanted.values()), partitions))
        for op in self._operations:
            if op.name == "sdy.manual_computation":
                manual = {name for name in changed if f'"{name}"' in str(op.attributes["manual_axes"])}
                if manual:
                    raise UsageError(
                        f"axis {', '.join(sorted(manual))} is manual in the program (shard_map): the shapes "
                        "inside depend on the mesh that the program was lowered for",
                        hint="keep the size of this axis, or capture the function itself for the other mesh",
                    )
        for op in mesh_ops:
            mesh = meshes.get(_symbol_name(op))
            if mesh is not None:
                self._resize(op, mesh.mesh.resized(wanted).axes, wanted)
        return _checked_devices(prod(wanted.values()))

    def _resize(self, op: MlirOperation, axes: Mapping[str, int], wanted: Mapping[str, int]) -> None:
        """Set the axis sizes of one mesh in the program. Raises ``UsageError`` if the mesh lists its devices,
        or if its number of devices would differ from the number in the ``wanted`` mesh.
        """
        sdy = self._bindings.sdy
        before = read_mesh(op.attributes["mesh"], sdy)
        if prod(axes.values()) != prod(wanted.values()):
            raise UsageError(
                f"the program has another mesh, {before.mesh}, with "
                f"{prod(axes.values())} devices, but {_axes_text(wanted)} has {prod(wanted.values())}",
                hint="keep the sizes, or capture the function itself for the other mesh",
            )
        if before.device_ids:
            raise UsageError(
                f"the mesh {before.mesh} of the program has an explicit device order, "
                "which does not extend to other sizes",
                hint="keep the sizes, or capture the function itself for the other mesh",
            )
        sizes = [sdy.MeshAxisAttr.get(name, size) for name, size in axes.items()]
        op.attributes["mesh"] = sdy.MeshAttr.get(sizes)

    def check(self, devices: int) -> None:
        """Check that the partitioner can process the program.

        Raises ``UsageError`` if it is partitioned already, ``UnsupportedError`` for operations that another
        process cannot partition, and ``FormatError`` for shardings that XLA would drop and for recursion.
        """
        _check_inlined_size(self._operations)
        # XLA would silently drop a GSPMD sharding that it cannot read.
        checked: set[bytes] = set()
        for op in self._operations:
            attributes: Any = op.attributes
            shardings: list[Any] = [attributes[_SHARDING]] if _SHARDING in attributes else []
            if op.name == "func.func":
                for kind in ("arg_attrs", "res_attrs"):
                    if kind in attributes:
                        shardings += [value[_SHARDING] for value in attributes[kind] if _SHARDING in value]
            for sharding in shardings:
                data: bytes = sharding.value_bytes
                if data in checked or not data or data.startswith(_PROTOBUF_START):
                    continue
                hlo: Any = import_module("jaxlib._hlo")
                try:
                    hlo.HloSharding.from_string(data.decode())
                except (RuntimeError, UnicodeDecodeError):
                    raise FormatError(
                        f"{_SHARDING} {data[:80].decode(errors='replace')!r} is not a sharding",
                        position=str(op.location),
                        hint="write a sharding such as {devices=[2,4]<=[8]}, {replicated} or {manual}",
                    ) from None
                checked.add(data)
        # On one device JAX leaves no trace of a shard_map.
        is_manual = devices == 1 or any(
            "SPMDFullToShardShape" in _custom_call_target(op) for op in self._operations
        )
        for op in self._operations:
            if op.name in _COLLECTIVES and not (is_manual or _is_in_shard_map(op) or _is_local(op)):
                raise UsageError(
                    f"the program is partitioned already: {op.name} is outside of any shard_map",
                    hint="omit `mesh`",
                )
            # XLA reads MHLO as well.
            registered = cast("Any", op).context.is_registered_operation
            if not (op.name.startswith("mhlo.") or registered(op.name)):
                raise UnsupportedError(
                    f"{op.name} is not a StableHLO operation",
                    position=str(op.location),
                    hint="lower the program with jax.jit(f).lower(...)",
                )
            if _CUSTOM_PARTITIONING in _custom_call_target(op):
                raise UnsupportedError(
                    "the program partitions an operation by its own function (custom_partitioning), "
                    "which exists only in the process that lowered it",
                    position=str(op.location),
                    hint="write the operation with shard_map instead",
                )

    def unsharded(self, kind: str) -> list[bool]:
        """Return a mask of the arguments (``kind`` is ``arg_attrs``) or results (``res_attrs``) of the entry
        function that have no sharding, so that the partitioner chooses one.
        """
        if self.entry is None:
            return []
        attributes: Any = self.entry.attributes
        if kind not in attributes:
            function_type: Any = attributes["function_type"].value
            values = function_type.inputs if kind == "arg_attrs" else function_type.results
            return [True] * len(values)
        return [
            not any(name in value for name in _SHARDINGS)
            and not (_FRONTEND in value and "xla.sdy.sharding" in value[_FRONTEND])
            for value in attributes[kind]
        ]


def _check_inlined_size(operations: Sequence[MlirOperation]) -> None:
    """Raise ``FormatError`` for recursive functions, and ``UnsupportedError`` if inlining all calls makes the
    program too large. ``operations`` are in post-order, as MLIR walks.
    """
    own_sizes, calls = dict[str, int](), dict[str, Counter[str]]()
    size, callees = 0, Counter[str]()
    for op in operations:
        if op.name == "func.func":
            name = f"@{_symbol_name(op)}"
            own_sizes[name], calls[name] = size, callees
            size, callees = 0, Counter[str]()
        else:
            size += 1
            if op.name == "func.call":
                callees[str(op.attributes["callee"])] += 1
    sizes, above = dict[str, int](), list[str]()
    waiting = list(own_sizes)
    while waiting:
        name = waiting[-1]
        missing = [callee for callee in calls[name] if callee in own_sizes and callee not in sizes]
        if name in sizes or not missing:
            waiting.pop()
            if above and above[-1] == name:
                above.pop()
            called = sum(times * sizes.get(callee, 0) for callee, times in calls[name].items())
            sizes[name] = own_sizes[name] + called
            continue
        above.append(name)
        entered = set(above)
        if recursive := next((callee for callee in missing if callee in entered), None):
            raise FormatError(f"function {recursive} calls itself", hint="write it as stablehlo.while")
        waiting.extend(missing)
    largest = max(sizes, key=sizes.__getitem__, default="")
    if largest and sizes[largest] > _MAX_INLINED:
        raise UnsupportedError(
            f"function {largest} has {sizes[largest]:,} operations after inlining its calls; the limit is "
            f"{_MAX_INLINED:,}",
            hint="write the repeated part as a loop (jax.lax.scan)",
        )


def _custom_call_target(op: MlirOperation) -> str:
    return str(op.attributes["call_target_name"]) if op.name == "stablehlo.custom_call" else ""


def _is_in_shard_map(op: MlirOperation) -> bool:
    """Return True if an operation is inside a ``shard_map``, or in a function that a ``shard_map`` may
    call.
    """
    parent: Any = op
    while parent is not None and parent.name != "func.func":
        if parent.name == "sdy.manual_computation":
            return True
        parent = parent.parent
    return parent is None or _symbol_name(parent) != "main"


def _is_local(op: MlirOperation) -> bool:
    """Return True for a communication in which every device is only connected to itself.

    JAX writes such operations for a ``shard_map`` over an axis of one device.
    """
    attributes: Any = op.attributes
    if "replica_groups" in attributes:
        return bool(attributes["replica_groups"].type.shape[-1] == 1)
    if "source_target_pairs" in attributes:
        pairs = np.array(attributes["source_target_pairs"])
        return bool((pairs[:, 0] == pairs[:, 1]).all())
    return False


def _checked_devices(devices: int) -> int:
    """Return ``devices`` unchanged. Raises ``UsageError`` if a mesh cannot have that many devices."""
    return Mesh(("devices",), (devices,)).num_devices


def _symbol_name(op: MlirOperation) -> str:
    return str(op.attributes["sym_name"]).strip('"')


def _axes_text(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())
