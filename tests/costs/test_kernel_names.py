"""Names of kernels as traces and sources of libraries have them, and names that no kernel has."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.costs.kernels import KernelFacts, kernel_facts
from hespas.costs.kernels.names import demangled, read_name
from hespas.graph import OpClass, find_dtype

TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1_AFC1_AFEM1_SK0"
TABLE = Path(__file__).with_name("kernel_names.tsv")
"""Class, library, family, element type, tile and name of real kernels; long names are cut."""


def rows() -> list[list[str]]:
    """The rows of the table without its header."""
    return [line.split("\t") for line in TABLE.read_text("utf-8").splitlines()[1:]]


@pytest.mark.parametrize("row", rows(), ids=[row[-1][:60] for row in rows()])
def test_what_a_name_says(row: list[str]) -> None:
    *stated, name = row
    found = kernel_facts(name)
    tile = "x".join(map(str, found.tile))
    assert [found.op_class.name, found.library, found.family, found.dtype, tile] == stated


def test_types_are_the_hubs() -> None:
    for row in rows():
        facts = kernel_facts(row[-1])
        for spelling in (facts.dtype, facts.result_dtype):
            found = find_dtype(spelling)
            assert not spelling or (found is not None and found.name == spelling)


def test_layouts_and_sizes_that_names_state() -> None:
    assert kernel_facts(TENSILE).layout == "TN"
    assert kernel_facts("ampere_sgemm_128x64_nn").layout == "nn"
    deep = kernel_facts(
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u, 64u, 128u, 128u, 6u>(float*)"
    )
    assert dict(deep.sizes) == {"n": 7168, "k": 2048, "groups": 1}


@pytest.mark.parametrize("name", ["", "my_kernel", "_Z9my_kernelPfi", "main", "kernel", "<<<>>>", "E" * 9])
def test_a_name_that_says_nothing(name: str) -> None:
    assert kernel_facts(name) == KernelFacts()


def test_a_mangled_name_in_one_pass() -> None:
    assert demangled("_ZN5aiter4normIDF16bLi64ELb1EEEvPT_i") == "aiter::norm<bf16, 64, true>"
    assert demangled("_Z4copyIfEvPT_") == "copy<float>"
    assert demangled("_ZN1a1bINS_1cIJLi1ELin2EEEEE") == "a::b<c<1, -2>>"
    assert demangled("_ZN1a1bIL_ZNS_1eEELNS_4KindE2EEE").startswith("a::b<")
    assert demangled("plain_kernel") == "plain_kernel"
    assert read_name("void a::b<x<1, 2>, (y)3>(int, z<4>)").arguments == ("x<1, 2>", "(y)3")


HOSTILE = (
    "_ZN" + "I" * 100_000,
    "_Z" + "9" * 100_000,
    "_ZN9999" + "a" * 50_000,
    "at::native::" * 20_000,
    "void " + "<" * 50_000 + ">" * 50_000,
    "Cijk_Ailk_Bljk_" + "BBS_" * 30_000 + "MT",
    "triton_tem_fused_" + "mm_" * 30_000 + "!",
    "cub::" + "a" * 100_000,
    "ck_tile::k" + "Gemm" * 30_000,
    "cutlass_80_tensorop_" + "bf16_" * 30_000,
    "nvjet_" + "a" * 100_000,
    "_" * 100_000,
    "::" * 50_000,
    "sm80_xmma_gemm_" + "f16" * 30_000,
    "{lambda(" * 20_000,
    "\x00\ud800\n" * 10_000,
)


@pytest.mark.parametrize(
    "name", HOSTILE, ids=[name[:12].encode("unicode_escape").decode() for name in HOSTILE]
)
def test_hostile_names_are_cut(name: str) -> None:
    assert isinstance(kernel_facts(name).op_class, OpClass)


@given(st.text(max_size=300) | st.text("ZNIEJLXFSTabi0123456789_<>(), :", max_size=300).map("_ZN".__add__))
def test_any_text_is_a_name(name: str) -> None:
    facts = kernel_facts(name)
    assert all(extent >= 0 for extent in facts.tile)
    assert demangled(demangled(name)) is not None
