"""Generators of synthetic traces of PyTorch's profiler and execution trace observer, of any size.

Fields, bytes per event, nesting of calls and events per kernel follow real traces. The numbers in the traces
are arbitrary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

__all__ = ["EVENTS_PER_KERNEL", "write_device_trace", "write_host_pair"]

Json = dict[str, object]

EVENTS_PER_KERNEL = 16
_THREAD, _GLOO_THREAD, _PROCESS = 4001, 4002, 4000
_BASE_US = 4_354_796_000_000
"""Time of the first event after ``baseTimeNanoseconds`` of the header [us]."""
_ROWS = 8
_CALLS = ("cudaGetDevice", "cudaStreamIsCapturing", "cudaEventQuery", "cudaLaunchKernel")
_UNITS_PER_BUCKET = 40
"""Number of layers between two all-reduces."""


class _Op(NamedTuple):
    """One operation of a layer: nesting depth, start and duration [us], and the numbers of the layer's
    tensors that it reads (``takes``) and writes (``makes``).
    """

    name: str
    depth: int
    span_us: tuple[int, int]
    takes: tuple[int, ...]
    makes: int
    schema: str


_VIEW = "(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"
_LAYER = (
    _Op("aten::linear", 0, (0, 30), (0, 1), 2, "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"),
    _Op("aten::t", 1, (2, 6), (1,), 1, "(Tensor(a) self) -> Tensor(a)"),
    _Op("aten::transpose", 2, (3, 4), (1,), 1, "(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"),
    _Op("aten::as_strided", 3, (4, 2), (1,), 1, _VIEW),
    _Op(
        "aten::addmm",
        1,
        (10, 18),
        (0, 1),
        2,
        "(Tensor self, Tensor mat1, Tensor mat2, *, Scalar b=1) -> Tensor",
    ),
    _Op("aten::relu_", 0, (31, 10), (2,), 2, "(Tensor(a!) self) -> Tensor(a!)"),
    _Op("aten::clamp_min_", 1, (32, 8), (2,), 2, "(Tensor(a!) self, Scalar min) -> Tensor(a!)"),
    _Op("aten::permute", 0, (42, 6), (2,), 2, "(Tensor(a) self, int[] dims) -> Tensor(a)"),
    _Op("aten::as_strided", 1, (43, 3), (2,), 2, _VIEW),
    _Op("aten::mul", 0, (50, 9), (2, 2), 3, "(Tensor self, Tensor other) -> Tensor"),
)
_LAYER_US = 60
_ALL_REDUCE = (
    "(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, "
    "__torch__.torch.classes.c10d.ReduceOp reduce_op, Tensor? sparse_indices, bool async_op=True, "
    "int timeout=-1) -> (Tensor[], __torch__.torch.classes.c10d.Work)"
)


def _values(*storages: int, extra: int = 1) -> Json:
    """Return the record of tensors of 8 x 128 floats, followed by ``extra`` scalars."""
    count = len(storages)
    return {
        "values": [
            *([2 * storage + 1, 2 * storage, 0, _ROWS * 128, 4, "cpu"] for storage in storages),
            *[1] * extra,
        ],
        "shapes": [*[[_ROWS, 128]] * count, *[[]] * extra],
        "types": [*["Tensor(float)"] * count, *["Int"] * extra],
        "strides": [*[[128, 1]] * count, *[[]] * extra],
    }


def _node(place: tuple[int, int], name: str, inputs: Json, outputs: Json, schema: str = "") -> Json:
    """Return a host operation with the attributes of schema 1.1.1; ``place`` is its id and its parent's
    id.
    """
    number, parent = place
    facts: tuple[tuple[str, str, object], ...] = (
        ("rf_id", "uint64", number),
        ("fw_parent", "uint64", 0),
        ("seq_id", "int64", number % 977),
        ("scope", "uint64", 0),
        ("tid", "uint64", 1),
        ("fw_tid", "uint64", 0),
        ("op_schema", "string", schema and name + schema),
        ("kernel_backend", "string", ""),
        ("kernel_file", "string", ""),
        ("tensor_range", "string", ""),
    )
    attrs: list[Json] = [{"name": key, "type": kind, "value": value} for key, kind, value in facts]
    return {
        "id": number, "name": name, "ctrl_deps": parent, "inputs": inputs, "outputs": outputs, "attrs": attrs,
    }  # fmt: skip


def _event(cat: str, name: str, number: int, span_us: tuple[float, float], thread: int) -> Json:
    start, length = span_us
    args: Json = {
        "External id": number + 7, "Record function id": number, "Concrete Inputs": ["", "", "1"],
        "Input type": ["float", "float", "Scalar"], "Input Strides": [[128, 1], [128, 1], []],
        "Input Dims": [[_ROWS + number % 5, 128], [_ROWS, 128], []], "Ev Idx": number,
    }  # fmt: skip
    return {
        "ph": "X", "cat": cat, "name": name, "pid": _PROCESS, "tid": thread,
        "ts": round(_BASE_US + start, 3), "dur": length, "args": args,
    }  # fmt: skip


def _roots() -> list[Json]:
    """Return the nodes of process, thread, and the list of process groups."""
    groups = json.dumps([{"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 2}])
    nothing = _values(extra=0)
    listed: Json = {"values": [groups], "shapes": [[]], "types": ["String"], "strides": [[]]}
    return [
        _node((1, 1), "[pytorch|profiler|execution_trace|process]", nothing, nothing),
        _node((2, 1), "[pytorch|profiler|execution_trace|thread]", nothing, nothing),
        _node((3, 2), "## process_group:init ##", listed, nothing),
    ]


def _operations() -> Iterator[tuple[Json, Json]]:
    """Yield node and event of operations without end, with an all-reduce after every 40 layers."""
    number, start_us, layer = 10, 0.0, 0
    while True:
        stack = [2]
        for op in _LAYER:
            del stack[op.depth + 1 :]
            tensors = [layer * 3 + place for place in range(4)]
            inputs = _values(*(tensors[place] for place in op.takes))
            outputs = _values(tensors[op.makes], extra=0)
            node = _node((number, stack[-1]), op.name, inputs, outputs, op.schema)
            span = (start_us + op.span_us[0], op.span_us[1] - 0.125)
            yield node, _event("cpu_op", op.name, number, span, _THREAD)
            stack.append(number)
            number += 1
        start_us += _LAYER_US
        layer += 1
        if layer % _UNITS_PER_BUCKET == 0:
            yield from _bucket(number, start_us, layer)
            number += 2
            start_us += 10


def _bucket(number: int, start_us: float, storage: int) -> Iterator[tuple[Json, Json]]:
    """Yield node and event of an all-reduce: of the call, and of its work on Gloo's thread."""
    tensor = [2 * storage + 1, 2 * storage, 0, _ROWS * 128, 4, "cpu"]
    inputs: Json = {
        "values": [[tensor], "<Object>", "<Object>", "<None>", True, -1],
        "shapes": [[[_ROWS, 128]], [], [], [], [], []],
        "types": ["GenericList[Tensor(float)]", "Object", "Object", "None", "Bool", "Int"],
        "strides": [[[128, 1]], [], [], [], [], []],
    }
    call = _node((number, 2), "c10d::allreduce_", inputs, _values(extra=0), _ALL_REDUCE)
    yield call, _event("cpu_op", "c10d::allreduce_", number, (start_us, 8), _THREAD)
    work = _node((number + 1, 2), "gloo:all_reduce", _values(storage, extra=0), _values(extra=0))
    span = (start_us + 4, 60.0)
    yield work, _event("user_annotation", "gloo:all_reduce", number + 1, span, _GLOO_THREAD)


def write_host_pair(folder: Path, nodes: int) -> int:
    """Write profile and execution trace of one rank without a device. Return the bytes written."""
    folder.mkdir()
    trace, profile = folder / "job.rank0.et.json", folder / "job.rank0.kineto.json"
    with trace.open("w") as traced, profile.open("w") as profiled:
        traced.write(f'{{"schema": "1.1.1-chakra.0.0.4", "pid": {_PROCESS}, "nodes": [\n')
        _header(profiled)
        traced.write(",\n".join(map(json.dumps, _roots())))
        for place, (node, event) in enumerate(islice(_operations(), nodes)):
            traced.write(",\n" + json.dumps(node))
            profiled.write((",\n" if place else "") + json.dumps(event))
        traced.write("\n]}")
        profiled.write("\n]}")
    return trace.stat().st_size + profile.stat().st_size


def _header(stream: TextIO) -> None:
    info = {"backend": "gloo", "rank": 0, "world_size": 2}
    stream.write('{"schemaVersion": 1, "deviceProperties": [], "baseTimeNanoseconds": 1790857026000000000,\n')
    stream.write(f'"distributedInfo": {json.dumps(info)},\n')
    stream.write('"traceEvents": [\n')


def write_device_trace(path: Path, events: int) -> int:
    """Write the profile of one GPU rank with about ``events`` events. Return the exact number."""
    kernels = max(events // EVENTS_PER_KERNEL, 1)
    with path.open("w") as stream:
        _header(stream)
        for kernel in range(kernels):
            texts = map(json.dumps, _around_a_kernel(kernel))
            stream.write((",\n" if kernel else "") + ",\n".join(texts))
        stream.write("\n]}")
    return kernels * EVENTS_PER_KERNEL


def _around_a_kernel(kernel: int) -> Iterator[Json]:
    """Yield the events of one kernel: operations, runtime calls with and without a launch, flow arrows,
    kernel.
    """
    start_us, number = 40.0 * kernel, 6 * kernel + 1
    for depth in range(6):
        span = (start_us + depth, 30.0 - 3 * depth)
        yield _event("cpu_op", _LAYER[depth].name, number + depth, span, _THREAD)
    where: Json = {"pid": _PROCESS, "tid": _THREAD}
    for place, name in enumerate(_CALLS):
        at: Json = {**where, "ts": round(_BASE_US + start_us + 6.011 + place, 3)}
        correlation = 4 * kernel + place + 1
        args: Json = {"cbid": 200 + place, "correlation": correlation, "External id": number + 5}
        yield {"ph": "X", "cat": "cuda_runtime", "name": name, **at, "dur": 0.754, "args": args}
        yield {"ph": "f", "id": correlation, **at, "cat": "ac2g", "name": "ac2g", "bp": "e"}
    begin = round(_BASE_US + start_us + 12.5, 3)
    place_of: Json = {"pid": 0, "tid": 7}
    yield {"ph": "s", "id": 4 * kernel + 4, **place_of, "ts": begin, "cat": "ac2g", "name": "ac2g"}
    facts: Json = {
        "External id": number + 5, "queued": 0, "device": 0, "context": 1, "stream": 7,
        "correlation": 4 * kernel + 4, "registers per thread": 90, "shared memory": 49152,
        "blocks per SM": 0.5925926, "warps per SM": 2.3703704, "grid": [64, 1, 1], "block": [128, 1, 1],
        "est. achieved occupancy %": 4,
    }  # fmt: skip
    name = f"void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x{kernel % 7}_nn_align4>(Params)"
    yield {"ph": "X", "cat": "kernel", "name": name, **place_of, "ts": begin, "dur": 25.0, "args": facts}
