"""What is known beside the columns of a profile: devices, versions, the HLO, and facts about operations."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from hespas.converters.xplane.collect import DeviceTable
from hespas.converters.xplane.lines import ABSENT, Line, Program
from hespas.converters.xplane.programs import Modules
from hespas.converters.xplane.texts import Texts
from hespas.graph.columns import IntArray
from hespas.schemas.xplane import CPU_PLANE, ENVIRONMENT_PLANE, GPU_PREFIX, METADATA_PLANE, TPU_PREFIX

__all__ = ["OP_FACTS", "attachments", "device_name", "metadata", "op_facts", "shown_line"]

OP_FACTS = "op-facts.json"
"""The attachment that tells what a trace says of each operation: ``{"modules": {MODULE: {OP: {...}}}}``."""

_UNNAMED_DEVICES = {("9.4", "304"): "AMD Instinct MI300X", ("9.4", "228"): "AMD Instinct MI300A"}
"""GPUs that the driver leaves without a name, by compute capability and processors."""
_DEVICE_FACTS = (
    "clock_rate",
    "core_count",
    "memory_bandwidth",
    "memory_size",
    "compute_cap_major",
    "compute_cap_minor",
    "peak_teraflops_per_second",
    "peak_hbm_bw_gigabytes_per_second",
    "peak_cmem_rd_bw_gigabytes_per_second",
    "peak_cmem_wr_bw_gigabytes_per_second",
    "peak_vmem_rd_bw_gigabytes_per_second",
    "peak_vmem_wr_bw_gigabytes_per_second",
    "has_megacore",
)
_VERSIONS = (
    "jax_version",
    "jaxlib_version",
    "cpu_version",
    "libtpu_version",
    "cuda_version",
    "cuda_runtime_version",
    "cuda_driver_version",
    "rocm_version",
)
_TEXT_FACTS = ("tf_op", "source", "hlo_category", "shape_with_layout", "long_name")
_NUMBER_FACTS = ("model_flops", "flops", "bytes_accessed")


def device_name(plane: str, stats: Mapping[str, str]) -> str:
    """The device behind a plane, as exactly as its stats tell."""
    if plane == CPU_PLANE:
        return "CPU"
    told = stats.get("device_type_string") or stats.get("gpu_device_name") or stats.get("device_type")
    if told:
        return told
    capability = f"{stats.get('compute_cap_major')}.{stats.get('compute_cap_minor')}"
    key = (capability, stats.get("core_count", ""))
    if stats.get("device_vendor") == "AMD" and key in _UNNAMED_DEVICES:
        return _UNNAMED_DEVICES[key]
    kind = "GPU" if plane.startswith(GPU_PREFIX) else "TPU" if plane.startswith(TPU_PREFIX) else ""
    return f"{stats.get('device_vendor', '')} {kind}".strip()


def metadata(planes: Mapping[str, Mapping[str, str]], used: list[str]) -> dict[str, str]:
    """Versions, and what the first ``used`` plane says of its device; nothing that names a machine."""
    versions = planes.get(METADATA_PLANE, {})
    found = {name: versions[name] for name in _VERSIONS if versions.get(name)}
    start = planes.get(ENVIRONMENT_PLANE, {}).get("profile_start_time")
    if start:
        found["profile_start_time_ns"] = start
    nothing: Mapping[str, str] = {}
    device = next((planes[plane] for plane in used if planes.get(plane)), nothing)
    return found | {f"device_{name}": device[name] for name in _DEVICE_FACTS if name in device}


def attachments(programs: list[Program], modules: Modules) -> dict[str, bytes]:
    """The HLO protos by the label of their program."""
    return {f"hlo/{modules.label(each.name, each.number)}": each.hlo for each in programs}


def op_facts(device: DeviceTable, label_row: IntArray, op_row: IntArray, strings: Texts) -> dict[str, bytes]:
    """The facts about operations as an attachment; none where the trace tells none."""
    stats = device.stats
    told = np.zeros(len(device), np.bool_)
    for name in _TEXT_FACTS:
        told |= stats[name] > 0
    for name in _NUMBER_FACTS:
        told |= stats[name] != ABSENT
    rows = np.flatnonzero(told & (op_row > 0))
    if not len(rows):
        return {}
    _, first = np.unique(np.stack([label_row[rows], op_row[rows]]), axis=1, return_index=True)
    modules: dict[str, dict[str, dict[str, str | int]]] = {}
    for row in rows[np.sort(first)].tolist():
        facts: dict[str, str | int] = {
            name: strings[int(stats[name][row])] for name in _TEXT_FACTS if stats[name][row] > 0
        }
        facts |= {name: int(stats[name][row]) for name in _NUMBER_FACTS if stats[name][row] != ABSENT}
        modules.setdefault(strings[int(label_row[row])], {})[strings[int(op_row[row])]] = facts
    document = {"schema": "hespas-op-facts/1", "modules": modules}
    return {OP_FACTS: msgspec.json.encode(document)}


def shown_line(line: Line) -> str:
    """A thread or stream as people know it."""
    return f"{line.plane}/{line.name}" if line.name else f"{line.plane}/{line.number}"
