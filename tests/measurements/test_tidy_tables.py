"""Tidy tables of kinds with layers and special headers, and columns of deviations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.graph.errors import FormatError
from hespas.measurements import Measurements, read_measurements

HEAD = (
    "hardware,kind,op,dtype,batch,q_len,kv_len,window,heads,kv_heads,head_dim,images,in_channels,out_channels,"
    "kernel,in_size,out_size,latency_us,latency_us_std\n"
)


def table(tmp_path: Path, *rows: str) -> Measurements:
    path = tmp_path / "mine.csv"
    path.write_text(HEAD + "\n".join(rows) + "\n")
    return read_measurements(path)


def test_attention_and_convolutions_are_measured_operations(tmp_path: Path) -> None:
    found = table(
        tmp_path,
        "H100-SXM,attention.context,,bf16,2,128,128,,8,4,64,,,,,,,10,0.5",
        "H100-SXM,attention.generation,,bf16,2,1,512,,8,4,64,,,,,,,5,",
        "H100-SXM,attention.encoder,,bf16,2,128,128,,8,,64,,,,,,,7,0.1",
        "H100-SXM,convolution,,f32,,,,,,,,16,64,128,3,56,28,20,1",
    )
    ops = found.ops
    assert [ops.kind[row] for row in range(4)] == [
        *("attention.context", "attention.generation", "attention.encoder", "convolution"),
    ]
    causal = 4 * 2 * 8 * 64 * (128 * 129 / 2)
    assert ops.flops.tolist() == [
        causal,
        4 * 2 * 8 * 64 * 512,
        4 * 2 * 8 * 64 * 128**2,
        2 * 16 * 28**2 * 128 * 64 * 9,
    ]
    # One new token: keys and values of 2 x 4 heads, 512 long; query and result of 2 x 8 heads.
    assert ops.bytes_moved[1] == 2 * 64 * 2 * (2 * 4 * 512 + 2 * 8)
    # A convolution moves its input once: 16 images of 56 x 56, and weights and result, in 4 bytes each.
    assert ops.bytes_moved[3] == 4 * (16 * 64 * 56**2 + 128 * 64 * 9 + 16 * 28**2 * 128)
    assert ops.dim("k")[3] == 64 * 9
    np.testing.assert_array_equal(found.spread_ns, [500, np.nan, 100, 1000])


def test_a_window_leaves_pairs_out(tmp_path: Path) -> None:
    rows = [
        f"H100-SXM,attention.context,,bf16,1,1024,1024,{window},8,8,64,,,,,,,10,1" for window in ("", "128")
    ]
    whole, windowed = table(tmp_path, *rows).ops.dim("pairs").tolist()
    assert whole == 1024 * 1025 / 2
    assert windowed == whole - (1024 - 128) * (1024 - 128 + 1) / 2


def test_an_unknown_kind_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'attention'") as caught:
        table(tmp_path, "H100-SXM,attention,,bf16,1,8,8,,8,8,64,,,,,,,10,1")
    assert "attention.context" in (caught.value.hint or "")


def test_what_a_row_leaves_open_is_the_usual(tmp_path: Path) -> None:
    """Operands and result are moved once; a sum over rows writes one element of each; every query head has
    keys and values of its own; experts are gated and of one device.
    """
    head = "hardware,kind,op,dtype,rows,columns,passes,batch,q_len,heads,kv_heads,head_dim,"
    head += "tokens,hidden,inter,topk,experts,latency_us\n"
    path = tmp_path / "mine.csv"
    path.write_text(
        head
        + "H100-SXM,vector,aten::add,bf16,10,100,,,,,,,,,,,,1\n"
        + "H100-SXM,vector,relu,bf16,10,100,,,,,,,,,,,,1\n"
        + "H100-SXM,vector,add,bf16,10,100,2,,,,,,,,,,,1\n"
        + "H100-SXM,reduction,sum,bf16,10,100,,,,,,,,,,,,1\n"
        + "H100-SXM,quantize,scale_matrix,bf16,10,100,1.5,,,,,,,,,,,1\n"
        + "H100-SXM,attention.context,,bf16,,,,2,128,8,,64,,,,,,1\n"
        + "H100-SXM,moe,balanced,bf16,,,,,,,,,4,256,512,2,8,1\n"
    )
    ops = read_measurements(path).ops
    assert ops.bytes_moved[:5].tolist() == [6000, 4000, 4000, 2 * (1000 + 10), 3000]
    assert ops.dim("kv_heads")[5] == 8
    assert ops.bytes_moved[5] == 2 * 4 * 2 * 128 * 8 * 64
    assert ops.kind[6] == "moe"
    assert ops.flops[6] == 2 * (4 * 2) * 3 * 256 * 512
    assert np.isfinite(ops.bytes_moved[6])


def test_norms_and_pools_of_tpu_tables_have_their_kinds(tmp_path: Path) -> None:
    path = tmp_path / "tpu.csv"
    rows = [
        f'{op},"{shape}",9,10,1000,tpu_v4,float16\n'
        for op, shape in (
            ("batch_norm", "8,5,25"),
            ("avg_pool", "2,4,5,25"),
            ("max_pool", "2,4,5,25"),
            ("relu", "40,25"),
        )
    ]
    path.write_text("op,shape,op_us_mean,module_us,elements,hardware,dtype\n" + "".join(rows))
    ops = read_measurements(path).ops
    assert [ops.kind[row] for row in range(4)] == ["normalization", "pooling", "pooling", "vector"]
