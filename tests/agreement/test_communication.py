"""Communication of a recording: analysis, op graph, trace and simulation agree with the file.

Traces are made here with the names, shapes and structure of recordings of vLLM with symmetric memory, of
DeepEP in namespaces of forks, of training with NCCL, and of Gloo on CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isnan
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.graph import OpClass, Workload
from tests.agreement.raw_kineto import RawKineto, read_raw
from tests.converters.pytorch.traces import Json, annotation, host, kernel, launch, write_kineto

BF16 = "c10::BFloat16"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
GROUPS = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": list(range(8)), "group_size": 8}]
JOB: Json = {
    "distributedInfo": {"rank": 0, "world_size": 8, "backend": "nccl", "pg_config": GROUPS},
    "deviceProperties": [{"id": 0, "name": "NVIDIA B200"}],
}
Work = tuple[str, str, Json, float, int]
"""Operation of the host, kernel, arguments of the operation, length [us], stream."""


def inputs(*shapes: Sequence[int], values: Sequence[str] = ()) -> Json:
    """Tensors in bf16 and strings behind them."""
    dims = [list(shape) for shape in shapes] + [[] for _ in values]
    types = [BF16 for _ in shapes] + ["" for _ in values]
    return {"Input Dims": dims, "Input type": types, "Concrete Inputs": ["" for _ in shapes] + list(values)}


def recording(path: Path, works: Sequence[Work], facts: Json | None = None) -> Path:
    """Each operation launches its kernel; kernels of a stream follow each other, streams overlap."""
    events: list[Json] = []
    free = {7: 40.0, 20: 55.0}
    for place, (name, of_device, args, length_us, stream) in enumerate(works):
        at_us = 4.0 * place
        events.append(host(name, at_us, 3.0, place + 1, args))
        events.append(launch(at_us + 1, 100 + place))
        category = "gpu_memset" if of_device.startswith("Memset") else "kernel"
        stated = facts if "nccl" in of_device else None
        begin = max(free[stream], at_us + 2.5)
        events.append(kernel(of_device, begin, length_us, 100 + place, stated, stream=stream, cat=category))
        free[stream] = begin + length_us + 0.25
    return write_kineto(path, events, **JOB)


MM = ("aten::mm", GEMM, inputs((2048, 5120), (5120, 2560)), 31.5, 7)
FILL = ("aten::zero_", "Memset (Device)", inputs((2048, 5120)), 9.25, 7)


def symmetric(path: Path) -> Path:
    """73 in-place all-reduces by multicast, and one by NCCL that the host states."""
    reduced = inputs((2048, 5120), values=("sum", "0"))
    multimem = "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(P, unsigned int)"
    talk = ("symm_mem::multimem_all_reduce_", multimem, reduced, 28.5, 7)
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    last = ("c10d::allreduce_", nccl, inputs((2048, 5120)), 22.0, 7)
    facts: Json = {
        "Collective name": "allreduce", "In msg nelems": 2048 * 5120, "Out msg nelems": 2048 * 5120,
        "dtype": "BFloat16", "Group size": 8, "Process Group Name": "0",
        "Process Group Ranks": str(list(range(8))),
    }  # fmt: skip
    return recording(path, [*[MM, talk] * 73, MM, last], facts)


def others_of_symmetric_memory(path: Path) -> Path:
    """The other operations of symmetric memory."""
    tensor, gathered = (1024, 512), (8192, 512)
    works: list[Work] = [
        MM,
        (
            "symm_mem::one_shot_all_reduce",
            "void at::one_shot_all_reduce_kernel<c10::BFloat16, 16>(P)",
            inputs(tensor, values=("sum", "0")),
            11.0,
            20,
        ),
        (
            "symm_mem::two_shot_all_reduce_",
            "void at::two_shot_all_reduce_kernel<c10::BFloat16, 16>(P)",
            inputs(tensor, values=("sum", "0")),
            12.0,
            20,
        ),
        (
            "symm_mem::multimem_all_gather_out",
            "void at::multimem_all_gather_kernel<16>(P)",
            inputs(tensor, gathered, values=("0",)),
            13.0,
            20,
        ),
        MM,
        (
            "symm_mem::multimem_one_shot_all_reduce_out",
            "void at::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>(P)",
            inputs(tensor, tensor, values=("sum", "0")),
            14.0,
            20,
        ),
        FILL,
    ]
    return recording(path, works)


def experts(path: Path) -> Path:
    """DeepEP in three namespaces, beside products."""
    names = (
        "void dpsk::ep::internode::dispatch<false, 8, true, 65536>(int4*, float*, int*)",
        "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
        "void foo::bar::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)",
        "void dpsk::ep::internode_ll::dispatch<true, 7168>(void*)",
    )
    works: list[Work] = [MM, FILL]
    for place, name in enumerate(names):
        works += [("FusedDispatch", name, {}, 40.5 + place, 20), MM]
    layout = "void dpsk::ep::layout::get_dispatch_layout<256, 32, 8>(long const*)"
    return recording(path, [*works, ("FusedDispatch", layout, {}, 3.0, 7)])


RECORDED: list[tuple[Callable[[Path], Path], int]] = [
    (symmetric, 74),
    (others_of_symmetric_memory, 4),
    (experts, 5),
]


def workload(path: Path) -> Workload:
    found = hespas.read(path, workload=True)
    assert isinstance(found, Workload)
    return found


def simulated(path: Path) -> tuple[float, float, float]:
    """Compute, communication and exposed communication [ns] of the first rank."""
    found = json.loads(hespas.simulate(path).to_json())["ranks"][0]
    return found["compute_ns"], found["comm_ns"], found["exposed_comm_ns"]


def figures(raw: RawKineto) -> tuple[float, float, float]:
    return raw.compute_ns, raw.communication_ns, raw.exposed_ns


@pytest.mark.parametrize(("make", "count"), RECORDED, ids=[make.__name__ for make, _ in RECORDED])
def test_every_way_to_ask_finds_the_communication_of_the_file(
    make: Callable[[Path], Path], count: int, tmp_path: Path
) -> None:
    path = make(tmp_path / "rank0.pt.trace.json")
    raw = read_raw(path)
    assert len(raw.communication) == count
    sizes = sorted(size for size in raw.bytes if not isnan(size))

    found = hespas.analyze(path).tables
    whole = found.breakdown.rows()[0]
    assert (whole.compute_ns, whole.communication_ns, whole.exposed_communication_ns) == figures(raw)
    assert sum(row.count for row in found.collectives.rows()) == count

    assert simulated(path) == figures(raw)
    assert hespas.simulate(path).timeline.finish_ns[0] == raw.span_ns

    traces = tmp_path / "et"
    hespas.convert(path, traces, target_format="chakra")
    assert simulated(traces) == pytest.approx(figures(raw), rel=1e-9)
    for each in (path, traces):
        program = workload(each).classes[0]
        talks = np.flatnonzero(program.op_class == int(OpClass.COLLECTIVE))
        assert len(talks) == count
        known = program.collectives.comm_bytes
        assert sorted(known[~np.isnan(known)].tolist()) == sizes


def gloo(path: Path) -> Path:
    """Two steps of a CPU: calls that return at once, work on Gloo's thread, operations that nest."""
    events: list[Json] = []
    for step in range(2):
        at_us = 1000.0 * step
        events.append(host("aten::linear", at_us, 300, 100 * step + 1, inputs((64, 64), (64, 64))))
        events.append(host("aten::addmm", at_us + 50, 200, 100 * step + 2, inputs((64,), (64, 64), (64, 64))))
        call = host("c10d::allreduce_", at_us + 310, 20, 100 * step + 3, inputs((64, 64)))
        events.append(call)
        events.append(annotation("gloo:all_reduce", at_us + 335, 400, 100 * step + 4, tid=2))
        events.append(host("aten::add_", at_us + 400, 100, 100 * step + 5, inputs((64, 64), (64, 64))))
    return write_kineto(path, events, distributedInfo={"rank": 0, "world_size": 2, "backend": "gloo"})


def test_a_run_without_a_device_takes_the_same_time_everywhere(tmp_path: Path) -> None:
    path = gloo(tmp_path / "rank0.pt.trace.json")
    raw = read_raw(path)
    found = hespas.analyze(path).tables
    whole = found.breakdown.rows()[0]
    assert (whole.compute_ns, whole.communication_ns, whole.exposed_communication_ns) == figures(raw)
    assert simulated(path) == figures(raw)
    assert whole.span_ns == raw.span_ns == hespas.simulate(path).timeline.finish_ns[0]
    assert [(row.kind, row.count) for row in found.collectives.rows()] == [("all_reduce", 2)]


def test_communication_is_a_lower_bound_where_kernels_are_of_unknown_class(tmp_path: Path) -> None:
    vague: Work = ("my::op", "kernel_of_nobody_knows_what", {}, 40.0, 7)
    path = recording(tmp_path / "vague.pt.trace.json", [MM, vague, MM])
    assert "exposed communication at least 0.0%" in hespas.analyze(path).headline()
    path = recording(tmp_path / "clear.pt.trace.json", [MM, FILL, MM])
    assert "at least" not in hespas.analyze(path).headline()
