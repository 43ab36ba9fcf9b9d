"""Small traces of PyTorch, as its profiler and its execution trace observer write them."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.pytorch import FORMAT, FORMAT_ET, FORMAT_KINETO
from hespas.graph import Diagnostics, OpGraph, Profile, Workload

__all__ = [
    "DATA",
    "NOTHING",
    "Json",
    "Value",
    "absent",
    "annotation",
    "call",
    "deps",
    "dlrm",
    "flat_node",
    "gloo",
    "groups_node",
    "host",
    "kernel",
    "launch",
    "node",
    "read_et",
    "read_folder",
    "read_profile",
    "recorded",
    "tensor",
    "write_et",
    "write_kineto",
]

DATA = Path(__file__).parents[4] / "shared" / "data"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")

Json = dict[str, object]
Value = tuple[object, object, str]
"""A recorded value, its shape, and the name of its type."""

NOTHING: Value = ("<None>", [], "None")


def _event(cat: str, name: str, span_us: tuple[float, float], tid: int, args: Json) -> Json:
    start, length = span_us
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": length, "args": args,
    }  # fmt: skip


def host(
    name: str, start_us: float, length_us: float, record: int = 0, args: Json | None = None, *, tid: int = 1
) -> Json:
    ids: Json = {"Record function id": record, "External id": 5000 + 7 * record} if record else {}
    return _event("cpu_op", name, (start_us, length_us), tid, {**ids, **(args or {})})


def annotation(name: str, start_us: float, length_us: float, record: int = 0, *, tid: int = 1) -> Json:
    args: Json = {"Record function id": record} if record else {}
    return _event("user_annotation", name, (start_us, length_us), tid, args)


def call(name: str, start_us: float, length_us: float = 1, correlation: int = -1, *, tid: int = 1) -> Json:
    return _event("cuda_runtime", name, (start_us, length_us), tid, {"correlation": correlation})


def launch(start_us: float, correlation: int, *, tid: int = 1) -> Json:
    return call("cudaLaunchKernel", start_us, 1, correlation, tid=tid)


def kernel(
    name: str,
    start_us: float,
    length_us: float,
    correlation: int = -1,
    args: Json | None = None,
    *,
    stream: int = 7,
    cat: str = "kernel",
) -> Json:
    facts: Json = {"stream": stream, "device": 0, "correlation": correlation, **(args or {})}
    return _event(cat, name, (start_us, length_us), 0, facts)


def write_kineto(path: Path, events: Sequence[Json], **header: object) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], **header, "traceEvents": events}))
    return path


# --- execution traces


def tensor(storage: int, *shape: int, dtype: str = "float", size: int = 4) -> Value:
    elements = 1
    for extent in shape:
        elements *= extent
    return [1000 + storage, storage, 0, elements, size, "cpu"], list(shape), f"Tensor({dtype})"


def _io(values: Sequence[Value]) -> Json:
    return {
        "values": [value for value, _, _ in values],
        "shapes": [shape for _, shape, _ in values],
        "types": [kind for _, _, kind in values],
        "strides": [[] for _ in values],
    }


def node(  # noqa: PLR0917 - reads like the record
    number: int,
    name: str,
    parent: int,
    record: int,
    inputs: Sequence[Value] = (),
    outputs: Sequence[Value] = (),
    *,
    schema: str = "",
    tid: int = 1,
    facts: Json | None = None,
) -> Json:
    """An operation in the layout since 1.0.2."""
    attrs: Json = {
        "rf_id": record,
        "fw_parent": 0,
        "seq_id": -1,
        "scope": 0,
        "tid": tid,
        "op_schema": schema,
        **(facts or {}),
    }
    return {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": _io(inputs),
        "outputs": _io(outputs),
        "attrs": [{"name": key, "type": "", "value": value} for key, value in attrs.items()],
    }


def flat_node(  # noqa: PLR0917 - reads like the record
    number: int,
    name: str,
    parent: int,
    record: int,
    inputs: Sequence[Value] = (),
    outputs: Sequence[Value] = (),
) -> Json:
    """An operation as schema 1.0.1 has it."""
    there: Json = {
        f"{word}{suffix}": part
        for word, values in (("input", inputs), ("output", outputs))
        for suffix, part in (
            ("s", [value for value, _, _ in values]),
            ("_shapes", [shape for _, shape, _ in values]),
            ("_types", [kind for _, _, kind in values]),
        )
    }
    return {
        "name": name, "id": number, "rf_id": record, "parent": parent, "fw_parent": 0, "seq_id": -1,
        "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": "", **there,
    }  # fmt: skip


def groups_node(*groups: Json) -> Json:
    listed: Value = (json.dumps(groups), [], "String")
    return node(3, "## process_group:init ##", 2, 1, [listed])


def recorded(
    number: int,
    place: tuple[int, int],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    facts: Json | None = None,
) -> Json:
    """``record_param_comms`` at (parent, record id), with its facts as attributes, as since schema 1.1.0."""
    return node(number, "record_param_comms", *place, inputs, outputs, facts=facts)


def write_et(path: Path, nodes: Sequence[Json], schema: str = "1.1.1-chakra.0.0.4", pid: int = 9) -> Path:
    roots = [
        node(1, "[pytorch|profiler|execution_trace|process]", 1, 0, tid=0),
        node(2, "[pytorch|profiler|execution_trace|thread]", 1, 0),
    ]
    if schema == "1.0.1":
        roots = [
            flat_node(1, "[pytorch|profiler|execution_graph|process]", 1, 0),
            flat_node(2, "[pytorch|profiler|execution_graph|thread]", 1, 0),
        ]
    path.write_text(json.dumps({"schema": schema, "pid": pid, "time": "", "nodes": [*nodes, *roots]}))
    return path


# --- reading


def read_profile(path: Path) -> tuple[Profile, Diagnostics]:
    diagnostics = Diagnostics()
    assert FORMAT_KINETO.read is not None
    profile = FORMAT_KINETO.read(path, ReadOptions(), diagnostics)
    assert isinstance(profile, Profile)
    return profile, diagnostics


def read_et(path: Path, version: str = "") -> tuple[OpGraph, Diagnostics]:
    diagnostics = Diagnostics()
    assert FORMAT_ET.read is not None
    workload = FORMAT_ET.read(path, ReadOptions(version=version), diagnostics)
    assert isinstance(workload, Workload)
    return workload.classes[0], diagnostics


def read_folder(path: Path) -> tuple[Workload, Diagnostics]:
    diagnostics = Diagnostics()
    assert FORMAT.read is not None
    workload = FORMAT.read(path, ReadOptions(), diagnostics)
    assert isinstance(workload, Workload)
    return workload, diagnostics


def deps(graph: OpGraph) -> list[tuple[list[int], list[int]]]:
    """Data and control dependencies of each node."""
    return list(zip(graph.data_deps.to_lists(), graph.control_deps.to_lists(), strict=True))


def gloo(folder: Path, name: str) -> Path:
    """The files of one of the CPU sets, in a folder of their own."""
    place = folder / name
    place.mkdir()
    for source in sorted((DATA / "pytorch_cpu").glob(f"{name}.*")):
        shutil.copyfile(source, place / source.name)
    return place


@cache
def dlrm() -> Path:
    """The V100 set of eight ranks, unpacked."""
    place = Path(mkdtemp(prefix="hespas-dlrm-"))
    for kind in ("et", "kineto"):
        unpack(DATA / "profiles" / f"v100_dlrm_train_8rank_{kind}.tar.gz", place)
    return place


def unpack(source: Path, place: Path) -> None:
    """The files of an archive. ``extractall`` has filters since Python 3.11.4, and later wants one."""
    with tarfile.open(source) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                target = place / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
