"""Tables of AITER: number formats of 4 bits in products and experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.measurements import read_measurements

PRODUCTS = "hardware,dtype,batch,m,n,k,latency_us,n_entries,tflops\n"
EXPERTS = (
    "hardware,token,model_dim,inter_dim,expert,topk,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,latency_us\n"
)


@pytest.mark.parametrize("device", ["MI355X", "MI350X", "MI300X", "B200-SXM"])
def test_products_of_4_bits_have_a_time_on_every_device(tmp_path: Path, device: str) -> None:
    path = tmp_path / "gemm.csv"
    path.write_text(f"{PRODUCTS}{device},fp4_block,1,4096,4096,4096,30,1,4581\n")
    ops = read_measurements(path).ops
    assert ops.scheme[0] == "a4w4_mxfp4"
    # 4 bits and an 8-bit scale per 32 elements of both operands, results of 16 bits.
    assert ops.bytes_moved[0] == 4096**2 * (2 * 4.25 + 16) / 8
    assert np.isfinite(hespas.estimate_table(path, device).prediction.duration_ns).all()


@pytest.mark.parametrize(
    ("activations", "weights", "scheme"),
    [
        ("bfloat16", "bfloat16", "bf16"),
        ("bfloat16", "float4_e2m1fn_x2", "w4a16_mxfp4"),
        ("float8_e4m3fn", "float4_e2m1fn_x2", "w4a8_mxfp4_mxfp8"),
        ("float4_e2m1fn_x2", "float4_e2m1fn_x2", "a4w4_mxfp4"),
        ("float8_e4m3fnuz", "float8_e4m3fnuz", "a8w8_fp8"),
    ],
)
def test_experts_take_their_format_from_both_operands(
    tmp_path: Path, activations: str, weights: str, scheme: str
) -> None:
    path = tmp_path / "experts.csv"
    path.write_text(f"{EXPERTS}MI355X,1024,7168,256,256,8,bfloat16,{activations},{weights},per_1x32,1,300\n")
    assert read_measurements(path).ops.scheme[0] == scheme
    assert np.isfinite(hespas.estimate_table(path, "MI355X").prediction.duration_ns).all()


def test_a_time_that_rows_of_other_numbers_of_tokens_copy_counts_once(tmp_path: Path) -> None:
    times = {1: 70, 4: 70, 16: 70, 256: 120, 2048: 275, 8192: 275, 32768: 275}
    rows = [
        f"mi308x,{tokens},{hidden},192,128,8,bfloat16,bfloat16,bfloat16,No,1,{time}\n"
        for hidden in (2048, 4096)
        for tokens, time in times.items()
    ]
    path = tmp_path / "experts.csv"
    path.write_text(EXPERTS + "".join(rows))
    measured = read_measurements(path)
    # The largest of few tokens, which read all weights, and the smallest of many.
    assert measured.ops.dim("tokens").tolist() == [16, 256, 2048] * 2
    assert [(reason.reason, reason.count) for reason in measured.left_out] == [
        ("times that contradict other columns or rows", 8)
    ]
