"""The process a real compiler runs in, which may crash, hang or print as it likes: a job in, an answer out.

On standard input a line of JSON (:class:`Job`), then the program; on standard output a line of JSON
(:class:`Answer`), then the optimised HLO. ``jax._src``, ``jaxlib._jax`` and the compile-only clients of the
plugins are private: this module alone touches them, as jax 0.10 has them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from hespas.captures.mesh import Mesh
from hespas.converters.stablehlo.communication import read_mesh
from hespas.converters.stablehlo.mlir import Bindings, load_bindings
from hespas.converters.stablehlo.program import parse_program
from hespas.files.children import error_as_text
from hespas.graph.errors import FormatError, HespasError, UsageError

__all__ = ["Answer", "Job", "environment", "main"]

_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_NO_CHIP = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is held, so no other process is in the way
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_MAX_MESSAGE = 1500


class Job(msgspec.Struct, frozen=True):
    """What to compile for. ``axes`` and ``mesh`` are names and sizes of axes; ``config`` is the target
    configuration of a GPU, the last two speak of TPUs: how the cores of a chip are run, and the chips of a
    host that lacks some.
    """

    platform: str
    topology: str
    axes: tuple[str, ...]
    mesh: tuple[int, ...]
    config: str = ""
    chip_config: str = ""
    chips_of_host: tuple[int, ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """What came out. ``refused`` has the compiler's words and ``fault`` an error of ours where nothing did;
    ``memory`` in bytes, ``costs`` as the compiler states them; ``notes`` are what was chosen otherwise than
    asked.
    """

    refused: str = ""
    fault: dict[str, str] = {}
    memory: dict[str, int] = {}
    costs: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    cpu_s: float = -1.0
    peak_rss_bytes: int = -1


def environment() -> dict[str, str]:
    """Variables that keep the compilers from looking for a chip."""
    return dict(_NO_CHIP)


def main() -> int:
    """Do the one job on standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    program = sys.stdin.buffer.read()
    try:
        answer, text = _compiled(job, program)
    except HespasError as error:
        answer, text = Answer(fault=error_as_text(error)), b""
    except Exception as error:  # whatever a compiler raises is its refusal
        answer, text = Answer(refused=f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]), b""
    answers.write(msgspec.json.encode(answer) + b"\n" + text)
    answers.flush()
    return 0


def _compiled(job: Job, program: bytes) -> tuple[Answer, bytes]:
    devices, notes = _devices(job)
    bindings = load_bindings()
    module: Any = parse_program(program, bindings).module
    with module.context:
        if not list(module.body.operations):
            raise FormatError(
                "the program is empty", hint="give StableHLO of the whole mesh, as jax lowers it"
            )
        _check_axes(module, bindings, job)
        options = _options(module, devices)
        native = import_module("jaxlib._jax")
        flat = tuple(devices.reshape(-1).tolist())
        executable: Any = flat[0].client.compile(module, native.DeviceList(flat), options)
    text = "\n".join(each.to_string() for each in executable.hlo_modules()).encode("utf-8", "surrogateescape")
    cpu_s, peak_rss_bytes = _usage()
    answer = Answer(
        memory=_memory(executable.get_compiled_memory_stats()),
        costs=_costs(executable.cost_analysis),
        notes=notes,
        cpu_s=cpu_s,
        peak_rss_bytes=peak_rss_bytes,
    )
    return answer, text


def _devices(job: Job) -> tuple[np.ndarray[Any, np.dtype[np.object_]], tuple[str, ...]]:
    """The devices of the topology in the order of the mesh: neighbours in it neighbours on the wires where
    JAX finds such an order.
    """
    topologies = import_module("jax.experimental.topologies")
    if job.platform == "gpu":
        import_module("jax").devices()  # the plugin registers itself with what is set up then
        import_module("jax_plugins.xla_cuda13")
        described = topologies.get_topology_desc(
            platform="cuda", topology_name="target", topology=job.topology, target_config=job.config
        )
    else:
        chip: dict[str, Any] = {"chip_config_name": job.chip_config} if job.chip_config else {}
        if job.chips_of_host:
            chip["chips_per_host_bounds"] = list(job.chips_of_host)
        described = topologies.get_topology_desc(platform="tpu", topology_name=job.topology, **chip)
    listed = list(described.devices)
    if len(listed) != int(np.prod(job.mesh)):
        raise ValueError(f"the topology has {len(listed)} devices, the mesh {int(np.prod(job.mesh))}")
    try:
        axes = tuple(f"axis{place}" for place in range(len(job.mesh)))
        return topologies.make_mesh(described, job.mesh, axes).devices, ()
    except (AssertionError, NotImplementedError, ValueError) as error:
        devices = np.empty(len(listed), dtype=object)
        devices[:] = listed
        return devices.reshape(job.mesh), (
            f"devices stand in the mesh as the topology lists them: {str(error)[:300]}",
        )


def _check_axes(module: Any, bindings: Bindings, job: Job) -> None:
    """Raise ``UsageError`` where the program names its mesh, and it is another one than asked for."""
    wanted = dict(zip(job.axes, job.mesh, strict=True))
    meshes = [op.attributes["mesh"] for op in module.body.operations if op.operation.name == "sdy.mesh"]
    stated = [dict(mesh.axes) for mesh in (read_mesh(each, bindings.sdy) for each in meshes) if mesh.axes]
    if stated and wanted not in stated:
        raise UsageError(
            f"the mesh of the program is {Mesh.of(stated[0])}, and {Mesh.of(wanted)} is asked for",
            hint="give the mesh that the program was lowered for, and a target of its size",
        )


def _options(module: Any, devices: np.ndarray[Any, np.dtype[np.object_]]) -> Any:
    """Options for all devices. Raises ``ValueError`` where the module is for another number of them."""
    native = import_module("jaxlib._jax")
    attributes = module.operation.attributes
    count = devices.size
    replicas = _stated(attributes, "mhlo.num_replicas", 1)
    partitions = _stated(attributes, "mhlo.num_partitions", count // max(replicas, 1))
    if replicas * partitions != count:
        raise ValueError(f"the program is for {replicas * partitions} devices, the mesh has {count}")
    ids = np.array([device.id for device in devices.reshape(-1).tolist()], dtype=np.int64)
    options = native.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, partitions
    options.device_assignment = native.DeviceAssignment.create(ids.reshape(replicas, partitions))
    build = options.executable_build_options
    build.use_spmd_partitioning = partitions > 1
    build.use_shardy_partitioner = "sdy.mesh" in {each.operation.name for each in module.body.operations}
    return options


def _stated(attributes: Any, key: str, default: int) -> int:
    return int(attributes[key].value) if key in attributes else default


def _memory(stats: Any) -> dict[str, int]:
    found = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in _MEMORY}
    return {**found, "peak": int(getattr(stats, "peak_memory_in_bytes", -1))}


def _costs(analysis: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Totals only; figures per operand place say nothing of any one operation."""
    try:
        found = analysis()
    except Exception:  # compilers that have none say so by raising
        return {}
    kept = ("flops", "transcendentals", "bytes accessed", "optimal_seconds")
    return {key: float(found[key]) for key in kept if key in found}


def _usage() -> tuple[float, int]:
    if sys.platform == "win32":
        return -1.0, -1
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    unit = 1 if sys.platform == "darwin" else 1024
    return used.ru_utime + used.ru_stime, used.ru_maxrss * unit
