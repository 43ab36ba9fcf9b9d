"""Ranges around operations pass no class on to kernels: classes come from kernels and operations alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from tests.converters.pytorch.traces import Json, annotation, host, kernel, launch, write_kineto

MATMUL = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_"
    "kernel__5x_cublas"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, "
    "3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
FILL = "Memset (Device)"
CLASSES = {MATMUL: "contraction", ADD: "elementwise", FILL: "generate"}
SHAPES: Json = {
    "Input Dims": [[64, 64], [64, 64], []],
    "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
    "Concrete Inputs": ["", "", "1"],
}
WRAPPERS = [
    "Torch-Compiled Region: 0/0",
    "CompiledFunction",
    "CompiledFunctionBackward",
    "autograd::engine::evaluate_function: CompiledFunctionBackward",
    "autograd::engine::evaluate_function: AddmmBackward0",
    "ProfilerStep#3",
    "## Call CompiledFxGraph fabc ##",
    "cuda::CUDAGraph::replay",
    "nn.Module: Linear_0",
    "DistributedDataParallel.forward",
    "Optimizer.step#AdamW.step",
    "execute_32_context_0(0)_generation_32(32)",
    "QKVParallelLinear",
    "sglang::forward_decode",
    "trtllm::attention_layer",
    "torch::jit::forward",
    "matmul",
]


def class_counts(path: Path, wrappers: list[list[Json]], *, replayed: bool) -> dict[str, int]:
    """Return the number of operations of each class, with three kernels in each of some ranges: with a launch
    each, or one of a graph.
    """
    events: list[Json] = []
    for number, around in enumerate(wrappers):
        events += around
        for place, name in enumerate(CLASSES):
            call = 10 * number + (0 if replayed else place)
            if place == 0 or not replayed:
                events.append(launch(1000 * number + 10 + 20 * place, call))
            category = "gpu_memset" if name == FILL else "kernel"
            events.append(kernel(name, 1000 * number + 100 + 60 * place, 50 - place, call, cat=category))
    write_kineto(path, events, deviceProperties=[{"id": 0, "name": "NVIDIA H100"}])
    return {row.op_class: row.count for row in hespas.analyze(path).tables.classes.rows()}


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("of_user", [False, True])
def test_a_range_has_no_class(of_user: bool, replayed: bool, tmp_path: Path) -> None:
    wrappers = [
        [annotation(name, 1000 * at, 90, at + 1) if of_user else host(name, 1000 * at, 90, at + 1, SHAPES)]
        for at, name in enumerate(WRAPPERS)
    ]
    found = class_counts(tmp_path / "a.pt.trace.json", wrappers, replayed=replayed)
    assert found == dict.fromkeys(CLASSES.values(), len(WRAPPERS))


@pytest.mark.parametrize("replayed", [False, True])
def test_ranges_in_ranges_have_no_class(replayed: bool, tmp_path: Path) -> None:
    around = [host(name, place, 90 - 2 * place, place + 1, SHAPES) for place, name in enumerate(WRAPPERS[:5])]
    found = class_counts(tmp_path / "a.pt.trace.json", [around], replayed=replayed)
    assert found == dict.fromkeys(CLASSES.values(), 1)
