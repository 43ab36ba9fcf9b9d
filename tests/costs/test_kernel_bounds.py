"""Bounds on work by name and launch: by hand, and compared with known work of fixtures and real traces."""

from __future__ import annotations

from math import inf, isnan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hespas
from benchmarks.kernel_names import coverage_of, main
from hespas.converters.measured_ops.build import costed_ops
from hespas.converters.measured_ops.device_events import kernel_bounds
from hespas.costs.kernels import UNBOUNDED, WorkBounds, kernel_facts, launch_of, work_bounds
from hespas.graph import OpClass, Profile
from tests.costs.test_kernel_names import HOSTILE, rows

FIXTURES = Path(__file__).parents[2] / "fixtures" / "profiles"
DATA = Path(__file__).parents[2].parent / "shared" / "data" / "profiles"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")

Extents = tuple[int, int, int]
TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1_SN_SK"
FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >"
)


def bounds(name: str, grid: Extents, block: Extents = (256, 1, 1)) -> WorkBounds:
    return work_bounds(kernel_facts(name), grid, block)


def test_a_product_makes_no_more_than_its_tiles() -> None:
    # 280 blocks of 256 x 128: the product of 8,944 x 1,024 in Qwen on MI300X, of 35 x 8 tiles
    found = bounds(f"{TENSILE}0_", (280, 1, 1))
    assert found.elements_high == 280 * 256 * 128 >= 8944 * 1024
    assert isnan(found.elements_low), "depth may be split among blocks"
    assert not bounds(f"{TENSILE}3_", (192, 1, 1)).known, "Stream-K loops over tiles"


def test_a_product_of_known_split_makes_no_less() -> None:
    name = "Cijk_Ailk_Bljk_BBS_BH_MT256x128x64_MI16x16x16x1_SN_APM1_GSU1_GSUASB_PK0"
    found = bounds(name, (219, 40, 1))
    assert found.elements_high == 219 * 40 * 256 * 128
    assert found.elements_low == (218 * 256 + 1) * (39 * 128 + 1)
    assert found.flops_low == 2 * found.elements_low


def test_a_persistent_product_makes_a_tile_a_block_at_least() -> None:
    name = (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas"
    )
    found = bounds(name, (30, 4, 1), (384, 1, 1))
    assert found.elements_low == 119 * 128 + 1
    assert isnan(found.elements_high)


def test_a_name_that_states_the_problem() -> None:
    name = "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u, 64u, 128u, 128u, 6u>(float*)"
    found = work_bounds(kernel_facts(name))
    assert found.flops_low == 2 * 7168 * 2048
    assert found.bytes_low == 7168 * 2048 + 2048
    assert isnan(found.flops_high), "how many rows there are is known at run time only"


def test_elements_of_a_range_cut_evenly() -> None:
    found = bounds(f"{FILL}(int)", (9, 1, 1))
    assert (found.elements_low, found.elements_high) == (8 * 256 * 4 + 1, 9 * 256 * 8)
    assert (found.bytes_low, found.bytes_high) == (4 * found.elements_low, 4 * found.elements_high)
    copy = (
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(c10::BFloat16)#1}>(int)::{lambda(int)#1}>(int)"
    )
    exact = bounds(copy, (10, 1, 1), (128, 1, 1))
    assert (exact.elements_low, exact.elements_high) == (9 * 512 + 1, 10 * 512)


def test_what_xla_transposes_and_loops_over() -> None:
    # bf16[55862,5120] on MI300X: 873 x 80 tiles of 64 x 64; bf16[5120,16,4]: one element a thread
    assert bounds("input_transpose_fusion", (69840, 1, 1)).elements_high >= 55862 * 5120
    assert bounds("loop_transpose_fusion", (1280, 1, 1)).elements_high >= 5120 * 16 * 4


def test_rows_of_a_softmax() -> None:
    name = (
        "void at::native::cunn_SoftMaxForwardReg<c10::BFloat16, float, c10::BFloat16, Epilogue, long, 4>(int)"
    )
    found = bounds(name, (100, 1, 1), (1024, 1, 1))
    assert (found.elements_low, found.elements_high) == (100 * 1025, 100 * 4096)


@pytest.mark.parametrize(
    "text", ["", "[]", "[[1,2,3]]", "[[1,2,3],[4,5,x]]", "[[1,2,3],[4,5,6],[7]]", "9" * 40]
)
def test_a_launch_that_is_none(text: str) -> None:
    assert launch_of(text) is None


def test_a_launch_as_profiles_have_it() -> None:
    assert launch_of("[[1,2,3],[4,5,6]]") == ((1, 2, 3), (4, 5, 6))


_EXTENT = st.integers(1, 1 << 31)
_LAUNCH = st.tuples(_EXTENT, _EXTENT, _EXTENT)


@given(st.sampled_from([row[-1] for row in rows()] + list(HOSTILE)), _LAUNCH, _LAUNCH)
def test_low_is_never_above_high(name: str, grid: Extents, block: Extents) -> None:
    found = work_bounds(kernel_facts(name), grid, block)
    for low, high in ((found[0], found[1]), (found[2], found[3]), (found[4], found[5])):
        assert (0 if isnan(low) else low) <= (inf if isnan(high) else high)


@given(st.sampled_from([row[-1] for row in rows()]), st.tuples(*[st.integers(1, 999)] * 3))
def test_more_blocks_never_bound_less(name: str, grid: Extents) -> None:
    facts = kernel_facts(name)
    small, large = (work_bounds(facts, (grid[0] + more, *grid[1:]), (256, 1, 1)) for more in (0, 1))
    assert isnan(small.elements_high) or large.elements_high >= small.elements_high
    assert isnan(small.elements_low) or large.elements_low >= small.elements_low


def test_nothing_is_known_without_a_launch() -> None:
    assert work_bounds(kernel_facts(f"{FILL}(int)")) == pytest.approx(UNBOUNDED, nan_ok=True)


def test_columns_of_a_profile_and_texts_beside_its_graph() -> None:
    profile = hespas.read(FIXTURES / "ffn_train_rank0of2.pt.trace.json.gz")
    assert isinstance(profile, Profile)
    found = kernel_bounds(profile)
    assert len(found.op_class) == len(found.flops_low) == len(profile)
    for event, row in enumerate(profile.kernel_id.tolist()):
        facts = kernel_facts(profile.strings[row])
        assert found.facts[int(found.fact[event])] == facts
        assert found.op_class[event] == facts.op_class
    assert found.known.any()
    alone = profile.host_event < 0
    assert alone.any()
    graph = costed_ops(profile).graph
    keys = {graph.strings[row] for row in graph.extra.key.tolist()}
    assert "kernel_library" in keys
    assert np.isnan(graph.flops[graph.op_class == OpClass.UNKNOWN]).all()


def test_the_table_of_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(FIXTURES)]) == 1, "the fixture of Kineto launches all kernels alike, whatever they do"
    out = capsys.readouterr().out
    assert "ffn_train_rank0of2.pt.trace.json.gz" in out
    assert out.splitlines()[0].split()[:3] == ["trace", "classified", "bounded"]


# Trace -> least share of the device time with bounds, of what is no communication and has a recorded launch.
REAL = {
    "a100-40_recsys_train_rank3of8.json.gz": 0.63,
    "h100_bert-small_inf.json.gz": 0.86,
    "h100_qwen1.5-0.5b_inf.json.gz": 0.93,
    "h100_timesformer_inf.json.gz": 0.96,
    "mi300x_qwen1.5-0.5b_inf.json.gz": 0.82,
    "mi300x_sglang_qwen3-8b_prefill.json.gz": 0.95,
    "mi300x_timesformer_inf.json.gz": 0.96,
    "mi300x_jax_conv3d.xplane.pb": 0.95,
    "mi350x_rocprofv3_908_results.json.gz": 0.50,
}


@absent
@pytest.mark.parametrize("name", REAL)
def test_names_of_real_traces(name: str) -> None:
    profile = hespas.read(DATA / name)
    assert isinstance(profile, Profile)
    found = coverage_of(profile)
    assert found.classified > 0.999
    assert found.bounded_launches >= REAL[name]
    assert found.fails == 0
