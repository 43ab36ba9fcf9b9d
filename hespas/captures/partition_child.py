"""In a child: XLA's own partitioner, run for any number of devices with one.

XLA's CPU compiler is asked for an executable of N partitions whose devices are all the one CPU there is. It
propagates shardings (Shardy, or GSPMD), partitions, writes the partitioned module down
(``xla_dump_hlo_pass_re``), and goes on to code that nobody needs: the parent ends the process there.

Nothing of a CPU has touched the module at that place: numbers keep their formats, collectives are as the
partitioner chose them, and groups are meshes or iotas, so that 65,536 devices take what eight do.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from hespas.captures.mesh import Mesh
from hespas.captures.partition_checks import check_shardings, check_written_out
from hespas.converters.stablehlo.communication import COMMUNICATION, read_mesh
from hespas.converters.stablehlo.mlir import Bindings, Module, Operation, load_bindings
from hespas.converters.stablehlo.program import parse_program
from hespas.files.children import error_as_text
from hespas.files.sandbox import bounded_memory
from hespas.graph.errors import FormatError, HespasError, InvariantError, UnsupportedError, UsageError

__all__ = ["PARTITIONED", "REFUSED", "Settings", "main"]

PARTITIONED = ("after_spmd-partitioning", "sharding-removal.after_dce")
"""What stands in the name of the dump that is wanted; the second where there is one device."""

REFUSED = "refused.json"
"""The file that says why a program cannot be partitioned."""

_DUMPED = ("^(spmd-partitioning|pipeline-start)$", "^(dce|pipeline-start)$")
"""Passes to dump after: the partitioner (on one device what drops annotations), and the start of each
pipeline, since a file of the next one says that the wanted one is whole.
"""

_MEMORY_BYTES, _MEMORY_PER_BYTE = 8 << 30, 2_000
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")
_FRONTEND = "mhlo.frontend_attributes"
_CUSTOM_PARTITIONING = "CustomSPMDPartitioning"
_COLLECTIVES = frozenset(f"stablehlo.{name}" for name in COMMUNICATION - {"send", "recv"})


class Settings(NamedTuple):
    """What is asked for. ``axes`` are sizes of mesh axes by name, empty for those of the program; ``shardy``:
    shardings are propagated by Shardy, else by GSPMD.
    """

    program: str
    folder: str
    axes: dict[str, int]
    shardy: bool


def main() -> int:
    """Partition as :class:`Settings` in JSON, the one argument, say. What the folder holds is the answer."""
    settings = Settings(**json.loads(sys.argv[1]))
    folder = Path(settings.folder)
    os.environ["XLA_FLAGS"] = ""
    data = Path(settings.program).read_bytes()
    try:
        with bounded_memory(_MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)):
            _partition(data, settings)
    except HespasError as error:
        return _refused(folder, error_as_text(error))
    except MemoryError:
        return _refused(folder, _of_xla("more memory is needed than a program of this size may take"))
    except RuntimeError as error:
        return _refused(folder, _of_xla(str(error)))
    return 0


def _of_xla(message: str) -> dict[str, str]:
    return {"kind": "XLA", "message": message}


def _refused(folder: Path, told: Mapping[str, str]) -> int:
    (folder / REFUSED).write_text(json.dumps(told), encoding="utf-8")
    return 1


def _partition(data: bytes, settings: Settings) -> None:
    bindings = load_bindings()
    module = parse_program(data, bindings).module
    with cast("Any", module).context:
        program = _Program(module, bindings)
        devices = program.on_mesh(settings.axes)
        program.check(devices)
        _compile(program, devices, settings)


class _Program:
    """A module with annotations of either kind."""

    def __init__(self, module: Module, bindings: Bindings) -> None:
        self.module, self._bindings = module, bindings
        self._operations = list(_walk(module, bindings))
        self.entry = next(
            (op for op in self._operations if op.name == "func.func" and _name(op) == "main"), None
        )

    def on_mesh(self, axes: Mapping[str, int]) -> int:
        """Give the meshes these sizes, or leave them; returns the number of devices.

        Raises ``UsageError`` where axes are not those of the program, or where its shapes depend on them.
        """
        meshes = [op for op in self._operations if op.name == "sdy.mesh"]
        stated = {_name(op): read_mesh(op.attributes["mesh"], self._bindings.sdy) for op in meshes}
        stated = {name: mesh for name, mesh in stated.items() if mesh.axes}
        partitions = self._partitions()
        if not stated:
            return self._on_tiles(axes, partitions)
        programs = [dict(mesh.axes) for mesh in stated.values()]
        named = next((each for each in programs if set(each) == set(axes)), programs[0])
        if axes and list(axes) != list(named):
            raise UsageError(
                f"the axes of the mesh are {_axes(named)} in the program, and {_axes(axes)} are asked for",
                hint="name the axes of the program, in its order, with the sizes that they shall have",
            )
        wanted = {name: axes.get(name, size) for name, size in named.items()}
        changed = {name for name in named if wanted[name] != named[name]}
        if not changed:
            return _as_many(max(prod(wanted.values()), partitions))
        self._check_free(changed)
        for op in meshes:
            mesh = stated.get(_name(op))
            if mesh is not None:
                self._resize(op, {name: wanted.get(name, size) for name, size in mesh.axes}, wanted)
        return _as_many(prod(wanted.values()))

    def _partitions(self) -> int:
        """For how many partitions the program is. Raises ``UnsupportedError`` for replicas beside them."""
        partitions, replicas = (
            _count(self.module, f"mhlo.num_{what}") for what in ("partitions", "replicas")
        )
        if replicas > 1:
            raise UnsupportedError(
                f"the program is for {replicas} replicas (pmap), each of {partitions} partitions",
                hint="write it with jax.jit and a mesh, which has replicas as an axis",
            )
        return partitions

    def _on_tiles(self, axes: Mapping[str, int], partitions: int) -> int:
        """The devices of a program whose shardings are tiles, or that has none."""
        if partitions == 1 and axes and prod(axes.values()) == 1:
            return 1
        if partitions <= 1:
            raise UsageError(
                "the program says neither over which mesh nor how its data is split: each device would run "
                "all of it",
                hint="lower it with arguments that have shardings (jax.sharding.NamedSharding), or constrain "
                "values within it (jax.lax.with_sharding_constraint)",
            )
        if axes and prod(axes.values()) != partitions:
            raise UsageError(
                f"the program is sharded in tiles over {partitions} devices, and the mesh {_axes(axes)} has "
                f"{prod(axes.values())}",
                hint="tiles have no axes that could be resized: lower the program for the other mesh",
            )
        return _as_many(partitions)

    def _check_free(self, changed: set[str]) -> None:
        for op in self._operations:
            if op.name == "sdy.manual_computation":
                bound = {name for name in changed if f'"{name}"' in str(op.attributes["manual_axes"])}
                if bound:
                    raise UsageError(
                        f"axis {', '.join(sorted(bound))} is manual in the program (shard_map): the shapes "
                        "within are those of one device of the mesh that it was lowered for",
                        hint="leave this axis as it is, or capture the function itself for the other mesh",
                    )

    def _resize(self, op: Operation, axes: Mapping[str, int], wanted: Mapping[str, int]) -> None:
        """Give one mesh its sizes. Raises ``UsageError`` where its devices are listed, or are not as many as
        those of the mesh that is ``wanted``.
        """
        sdy = self._bindings.sdy
        before = read_mesh(op.attributes["mesh"], sdy)
        if prod(axes.values()) != prod(wanted.values()):
            raise UsageError(
                f"the program has another mesh, {_axes(dict(before.axes))}, which has "
                f"{prod(axes.values())} devices where {_axes(wanted)} has {prod(wanted.values())}",
                hint="leave the sizes as they are, or capture the function itself for the other mesh",
            )
        if before.device_ids:
            raise UsageError(
                f"the mesh {_axes(dict(before.axes))} of the program lists its devices in an order of "
                "its own, which says nothing of other sizes",
                hint="leave the sizes as they are, or capture the function itself for the other mesh",
            )
        sizes = [sdy.MeshAxisAttr.get(name, size) for name, size in axes.items()]
        op.attributes["mesh"] = sdy.MeshAttr.get(sizes)

    def check(self, devices: int) -> None:
        """Raise ``UsageError`` for what is partitioned already, ``UnsupportedError`` for what another process
        cannot partition, ``FormatError`` for shardings that XLA would drop and calls without end.
        """
        check_written_out(self._operations)
        check_shardings(self._operations)
        # On one device JAX leaves no mark of a shard_map.
        by_hand = devices == 1 or any("SPMDFullToShardShape" in _called(op) for op in self._operations)
        for op in self._operations:
            if op.name in _COLLECTIVES and not (by_hand or _is_manual(op) or _is_alone(op)):
                raise UsageError(
                    f"the program is partitioned already: {op.name} stands outside of any shard_map",
                    hint="leave `mesh` out",
                )
            if not _is_known(op):
                raise UnsupportedError(
                    f"{op.name} is no operation of StableHLO",
                    position=str(op.location),
                    hint="lower the program with jax.jit(f).lower(...)",
                )
            if _CUSTOM_PARTITIONING in _called(op):
                raise UnsupportedError(
                    "the program partitions an operation by a function of its own (custom_partitioning), "
                    "which lives in the process that lowered it",
                    position=str(op.location),
                    hint="write the operation with shard_map instead",
                )

    def unannotated(self, kind: str) -> list[bool]:
        """For each argument or result of the entry (``arg_attrs``, ``res_attrs``), whether its sharding is
        left to the partitioner.
        """
        if self.entry is None:
            return []
        attributes: Any = self.entry.attributes
        if kind not in attributes:
            function_type: Any = attributes["function_type"].value
            values = function_type.inputs if kind == "arg_attrs" else function_type.results
            return [True] * len(values)
        return [
            not any(name in each for name in _SHARDINGS)
            and not (_FRONTEND in each and "xla.sdy.sharding" in each[_FRONTEND])
            for each in attributes[kind]
        ]


def _compile(program: _Program, devices: int, settings: Settings) -> None:
    """Ask for the executable; the wanted file lies in the folder before it is made."""
    jax: ModuleType = import_module("jaxlib._jax")
    client: Any = jax.get_tfrt_cpu_client(asynchronous=False, num_devices=1)
    (device,) = client.devices()
    options: Any = jax.CompileOptions()
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, devices
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, settings.shardy
    build.allow_spmd_sharding_propagation_to_parameters = program.unannotated("arg_attrs")
    build.allow_spmd_sharding_propagation_to_output = program.unannotated("res_attrs")
    build.device_assignment = jax.DeviceAssignment.create(np.full((1, devices), device.id, np.int32))
    debug = build.debug_options
    debug.xla_dump_to, debug.xla_dump_hlo_as_text = settings.folder, True
    debug.xla_dump_hlo_pass_re = _DUMPED[devices == 1]
    client.compile_and_load(program.module, jax.DeviceList((device,)), options)
    raise InvariantError("XLA has compiled a program that was not to be compiled")


def _walk(module: Module, bindings: Bindings) -> Iterator[Operation]:
    found: list[Operation] = []

    def visit(op: Operation) -> object:
        found.append(op)
        return bindings.ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return iter(found)


def _called(op: Operation) -> str:
    return str(op.attributes["call_target_name"]) if op.name == "stablehlo.custom_call" else ""


def _is_manual(op: Operation) -> bool:
    """Whether an operation stands within a ``shard_map``, or in a function that one may call."""
    above: Any = op
    while above is not None and above.name != "func.func":
        if above.name == "sdy.manual_computation":
            return True
        above = above.parent
    return above is None or _name(above) != "main"


def _is_alone(op: Operation) -> bool:
    """Whether every device communicates with itself: of a ``shard_map`` over an axis of one device JAX leaves
    nothing else.
    """
    attributes: Any = op.attributes
    if "replica_groups" in attributes:
        return bool(attributes["replica_groups"].type.shape[-1] == 1)
    if "source_target_pairs" in attributes:
        pairs = np.array(attributes["source_target_pairs"])
        return bool((pairs[:, 0] == pairs[:, 1]).all())
    return False


def _is_known(op: Operation) -> bool:
    """Whether an operation is of a dialect that is read here, or of MHLO, which XLA reads as well."""
    context = cast("Any", op).context
    return op.name.startswith("mhlo.") or bool(context.is_registered_operation(op.name))


def _as_many(devices: int) -> int:
    """The number, if a mesh may have so many devices; raises ``UsageError`` where not."""
    return Mesh(("devices",), (devices,)).num_devices


def _name(op: Operation) -> str:
    return str(op.attributes["sym_name"]).strip('"')


def _count(module: Module, attribute: str) -> int:
    attributes = module.operation.attributes
    if attribute not in attributes:
        return 1
    text = str(attributes[attribute])
    found = _COUNT.fullmatch(text)
    if found is None:
        raise FormatError(
            f"{attribute} is {text[:80]}, and no number of devices", hint="lower the program again"
        )
    return int(found[1])


_COUNT = re.compile(r"([1-9][0-9]{0,17})(?: : [su]?i[0-9]+)?")


def _axes(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())
