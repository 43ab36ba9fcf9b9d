"""Kernels of a CUDA graph in a compiled region: each has the class of its own name."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from tests.converters.pytorch.traces import Json, call, host, kernel, launch, write_kineto

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"
FUSED = "triton_poi_fused_add_gelu_0"
DIMS: Json = {"Input Dims": [[64, 64]], "Input type": ["c10::BFloat16"]}
REGIONS = (
    "Torch-Compiled Region: 0/0",
    "Torch-Compiled Region",
    "CompiledFunction",
    "CompiledFunctionBackward",
    "## Call CompiledFxGraph fb3en3pmdtsn2pziyq6jiyhnewghozxvyb5vy5kk6ejlfff7gc3n ##",
)


def replay(path: Path, region: str) -> Path:
    """One launch of a graph inside a region: 4 products, 6 fused kernels, 90 fills."""
    spans = [(GEMM, 30.0)] * 4 + [(FUSED, 10.0)] * 6 + [("Memset (Device)", 1.0)] * 90
    events: list[Json] = [host(region, 0, 50, 1, DIMS), call("cudaGraphLaunch", 10, 5, 77)]
    at_us = 100.0
    for name, length_us in spans:
        kind = "gpu_memset" if name.startswith("Memset") else "kernel"
        events.append(kernel(name, at_us, length_us, 77, {"graph node id": 3}, cat=kind))
        at_us += length_us + 1
    return write_kineto(path, events)


@pytest.mark.parametrize("region", REGIONS)
def test_classes_of_a_replay_without_capture_come_from_kernels(region: str, tmp_path: Path) -> None:
    found = hespas.analyze(replay(tmp_path / "rank0.pt.trace.json", region)).tables
    times = {row.op_class: (row.count, row.total_ns) for row in found.classes.rows()}
    assert times == {
        "contraction": (4, 120_000),
        "fusion": (6, 60_000),
        "generate": (90, 90_000),
    }
    names = {row.operation: row.count for row in found.operations.rows()}
    assert names == {GEMM: 4, FUSED: 6, "Memset (Device)": 90}


def test_an_operation_without_a_rule_has_a_part_per_class_of_kernel(tmp_path: Path) -> None:
    events: list[Json] = [host("my::block", 0, 50, 1, DIMS)]
    for place, (name, length_us) in enumerate([(GEMM, 30.0), (FUSED, 10.0), (FUSED, 10.0)]):
        events += [launch(1 + 3 * place, place), kernel(name, 100 + 40 * place, length_us, place)]
    found = hespas.analyze(write_kineto(tmp_path / "rank0.pt.trace.json", events)).tables
    times = {row.op_class: row.total_ns for row in found.classes.rows()}
    assert times == {"contraction": 30_000, "fusion": 20_000}
    assert {row.operation for row in found.operations.rows()} == {"my::block"}
