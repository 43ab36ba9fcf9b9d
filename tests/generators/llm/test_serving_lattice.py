"""Kernels at grid points of a lattice compared with whole steps."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from hespas.generators.llm import Layout, ServingStep, load_model, precision_of
from hespas.generators.llm.serving_lattice import (
    LatticeGrids,
    ServingLatticeKernels,
    cached_tokens,
    lattice_kernels,
)
from hespas.graph import OpGraph
from hespas.graph.errors import UnsupportedError
from hespas.hardware import load_device
from hespas.operations import KINDS
from hespas.operations.from_graph import operations_of

_GRIDS = LatticeGrids(
    tokens=(4, 96), rows=(1, 4), batch=(4,), context=(512,), prompts=(1,), length=(96,), before=(0, 32)
)


def _sums(kernels: ServingLatticeKernels, part: str, point: int) -> np.ndarray:
    chosen = (kernels.part == kernels.parts.index(part)) & (kernels.point == point)
    return _work(kernels.graph, kernels.node[chosen], kernels.times[chosen])


def _work(graph: OpGraph, nodes: np.ndarray, times: np.ndarray) -> np.ndarray:
    columns = (np.ones(len(graph)), graph.flops, graph.bytes_read, graph.bytes_written)
    return np.array([float((column[nodes] * times).sum()) for column in columns])


@pytest.mark.parametrize(
    ("model", "layout"), [("Llama-3-8B", Layout(tp=2)), ("GPT-OSS-20B", Layout(tp=2, etp=2))]
)
def test_parts_add_up_to_a_step(model: str, layout: Layout) -> None:
    step = ServingStep(model=load_model(model), layout=layout, batch=4, context=512, fused=True)
    kernels = lattice_kernels(step, _GRIDS)
    graph = step.workload().classes[0]
    parts = _sums(kernels, "tokens", 0) + _sums(kernels, "rows", 1) + _sums(kernels, "decode", 0)
    whole = _work(graph, np.arange(len(graph)), np.ones(len(graph)))
    # a layer of the lattice settles its sum by itself, where the next norm of a step does it
    assert parts[1:] == pytest.approx(whole[1:], rel=0.02)
    prefill = ServingStep(
        model=load_model(model), layout=layout, phase="prefill", batch=1, prompt=96, fused=True
    )
    graph = prefill.workload().classes[0]
    parts = _sums(kernels, "tokens", 1) + _sums(kernels, "rows", 0) + _sums(kernels, "prompts", 0)
    assert parts[1:] == pytest.approx(_work(graph, np.arange(len(graph)), np.ones(len(graph)))[1:], rel=0.02)


def test_latents_become_keys_for_prompts_only() -> None:
    step = ServingStep(model=load_model("DeepSeek-V2-Lite"), layout=Layout(tp=2, etp=2), fused=True)
    kernels = lattice_kernels(step, _GRIDS)
    names = np.array(list(kernels.graph.strings))[kernels.graph.name_id[kernels.node]]
    made = np.array([name.endswith("kv_up") for name in names.tolist()])
    assert set(kernels.part[made].tolist()) == {kernels.parts.index("prompts")}
    # behind 32 tokens, those are made keys of once more
    flops = [float(kernels.graph.flops[kernels.node[made & (kernels.point == at)]].sum()) for at in (0, 1)]
    assert flops[1] / flops[0] == pytest.approx((96 + 32) / 96)


def test_experts_are_one_kernel_with_their_sizes() -> None:
    model = load_model("DeepSeek-V3")
    layout = Layout(tp=8, ep=4, etp=2)
    step = ServingStep(model=model, layout=layout, batch=16, fused=True, precision=precision_of("fp8"))
    ops = operations_of(step.workload().classes[0])
    rows = ops.kind.where("moe")
    assert len(rows) == 58
    sizes = [float(ops.dim(name)[rows[0]]) for name in KINDS["moe"]]
    assert dict(zip(KINDS["moe"], sizes, strict=True)) == {
        "tokens": 16, "hidden": 7168, "inter": 1024, "topk": 8, "experts": 256,
        "tensor_parallel": 1, "expert_parallel": 4, "matrices": 3,
    }  # fmt: skip
    narrow = ServingStep(model=model, layout=layout, fused=True, experts="nvfp4")
    device = load_device("B200-SXM")
    room = [cached_tokens(each, device, 0.9, tokens=8192, sequences=256) for each in (step, narrow)]
    assert room[1] > room[0] > 1e6
    assert cached_tokens(step, device, 0.3, tokens=8192, sequences=256) < 0


def test_a_cache_leaves_memory_for_libraries_of_gpus() -> None:
    """vLLM subtracts all memory that its tensors do not use, measured as the driver reports it."""
    gpu = load_device("H100-SXM")
    others = replace(gpu, kind="tpu")
    model = load_model("Llama-3-70B")
    for tp, groups_bytes in ((1, 0), (2, 544 * 2**20), (8, 688 * 2**20)):
        step = ServingStep(model=model, layout=Layout(tp=tp), fused=True, precision=precision_of("fp8"))
        room = [cached_tokens(step, each, 1.0, tokens=2048, sequences=64) for each in (gpu, others)]
        token_bytes = 2 * 80 * max(1, 8 // tp) * 128 * 2
        assert (room[1] - room[0]) * token_bytes == pytest.approx(400e6 + groups_bytes)


def test_data_ranks_gather_tokens_or_send_them_to_experts() -> None:
    model = load_model("DeepSeek-V3")
    for ep, wanted in ((8, "gather"), (32, "to_all")):
        step = ServingStep(model=model, layout=Layout(dp=ep, ep=ep), batch=16, fused=True)
        graph = step.workload().classes[0]
        names = [graph.strings[row] for row in graph.name_id[graph.collectives.node].tolist()]
        assert any("dispatch" in name and wanted in name for name in names)


def test_what_is_not_simulated() -> None:
    with pytest.raises(UnsupportedError, match="pipeline"):
        lattice_kernels(ServingStep(model=load_model("Llama-3-8B"), layout=Layout(pp=2)), _GRIDS)
    with pytest.raises(UnsupportedError, match="Mamba layers"):
        lattice_kernels(ServingStep(model=load_model("Mamba2-130M"), layout=Layout()), _GRIDS)


def test_grids_reach_their_ends() -> None:
    grids = LatticeGrids.up_to(tokens=8192, sequences=200, context=5000)
    for axis, last in ((grids.tokens, 8192), (grids.batch, 256), (grids.context, 8192), (grids.length, 8192)):
        assert axis[-1] == last
        assert list(axis) == sorted(set(axis))
    assert grids.before[0] == 0


@pytest.mark.parametrize(
    ("tokens", "sequences", "context"), [(2048, 64, 1000), (5000, 100, 3000), (16, 1, 40)]
)
def test_grids_of_smaller_limits_are_parts_of_larger_ones(tokens: int, sequences: int, context: int) -> None:
    small = LatticeGrids.up_to(tokens=tokens, sequences=sequences, context=context)
    large = LatticeGrids.up_to(tokens=16384, sequences=1024, context=8192)
    for field in fields(LatticeGrids):
        axis = getattr(small, field.name)
        assert axis == getattr(large, field.name)[: len(axis)]
