"""The closed form compared with the simulator, if it is installed.

``HESPAS_SCALESIM`` names a Python that has ``scalesim`` (3.0.0 runs on NumPy 1.26, not on 2.4).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hespas.estimators.systolic import fold_counts
from hespas.estimators.systolic.cycles import Array, Dataflow
from hespas.operations.build import ConvolutionProduct, convolution_product
from tests.limits import SAFETY_S

PYTHON = os.environ.get("HESPAS_SCALESIM", "")
PRODUCTS = ((1, 1, 1), (9, 5, 7), (33, 17, 20), (8, 8, 8), (4, 40, 3), (50, 2, 61))
CONVOLUTIONS = ((8, 11, 3, 2, 4, 6, 2), (7, 7, 1, 1, 3, 5, 1), (9, 9, 3, 3, 2, 4, 3))
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "general": {"run_name": "run"},
    "run_presets": {"InterfaceBandwidth": "CALC", "UseRamulatorTrace": "False"},
    "layout": {
        "IfmapCustomLayout": "False",
        "FilterCustomLayout": "False",
        "IfmapSRAMBankBandwidth": "10",
        "IfmapSRAMBankNum": "10",
        "IfmapSRAMBankPort": "2",
        "FilterSRAMBankBandwidth": "10",
        "FilterSRAMBankNum": "10",
        "FilterSRAMBankPort": "2",
    },
    "sparsity": {"SparsitySupport": "false"},
}
LAYOUT = (1,) * 18


def simulated(folder: Path, array: Array, layers: list[str], kind: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The simulator's reports of some layers: compute, and accesses."""
    presets = {
        "ArrayHeight": str(array.rows),
        "ArrayWidth": str(array.columns),
        **{f"{name}sramszkB": "1024" for name in ("ifmap", "filter", "ofmap")},
        "IfmapOffset": "0",
        "FilterOffset": "10000000",
        "OfmapOffset": "20000000",
        "Dataflow": array.dataflow,
        "Bandwidth": "10",
        "ReadRequestBuffer": "512",
        "WriteRequestBuffer": "512",
    }
    sections = {**SECTIONS, "architecture_presets": presets}
    config = "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = {text}" for key, text in keys.items())
        for section, keys in sections.items()
    )
    (folder / "c.cfg").write_text(config + "\n")
    # The last field of a line is dropped, and a line of the layout is asked for although layouts are off.
    rows = [f"layer{number},{layer}," for number, layer in enumerate(layers)]
    (folder / "t.csv").write_text("\n".join(["header,", *rows, ""]))
    spans = [f"layer{number},{','.join(map(str, LAYOUT))}," for number in range(len(layers))]
    (folder / "l.csv").write_text("\n".join(["header,", *spans, ""]))
    done = subprocess.run(
        [
            PYTHON,
            "-m",
            "scalesim.scale",
            "-c",
            "c.cfg",
            "-t",
            "t.csv",
            "-l",
            "l.csv",
            "-p",
            "out",
            "-i",
            kind,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SAFETY_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compute, accesses = (
        pd.read_csv(folder / "out" / "run" / f"{name}_REPORT.csv", skipinitialspace=True)
        for name in ("COMPUTE", "DETAILED_ACCESS")
    )
    return compute, accesses


def agree(array: Array, product: ConvolutionProduct, compute: pd.DataFrame, accesses: pd.DataFrame) -> None:
    found = fold_counts(product.m, product.n, product.k, array, batch=product.batch)
    assert (compute["Stall Cycles"] == 0).all()
    assert found.cycles.tolist() == compute["Total Cycles"].tolist()
    for ours, theirs in (
        (found.overall_pct, "Overall Util %"),
        (found.mapping_pct, "Mapping Efficiency %"),
        (found.compute_pct, "Compute Util %"),
    ):
        np.testing.assert_allclose(ours, compute[theirs].to_numpy(), rtol=1e-12)
    for words, name in (
        (found.ifmap_reads, "SRAM IFMAP Reads"),
        (found.filter_reads, "SRAM Filter Reads"),
        (found.ofmap_writes, "SRAM OFMAP Writes"),
    ):
        assert words.tolist() == accesses[name].tolist()


@pytest.mark.skipif(not PYTHON, reason="HESPAS_SCALESIM names no Python with scalesim")
@pytest.mark.parametrize("flow", ["os", "ws", "is"])
@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (8, 4)])
def test_products_and_convolutions(flow: Dataflow, rows: int, columns: int, tmp_path: Path) -> None:
    array = Array(rows, columns, flow)
    m, n, k = (np.array(column, np.float64) for column in zip(*PRODUCTS, strict=True))
    layers = [",".join(map(str, sizes)) for sizes in PRODUCTS]
    agree(array, ConvolutionProduct(m, n, k, np.ones_like(m)), *simulated(tmp_path, array, layers, "gemm"))
    columns_of = [np.array(column, np.float64) for column in zip(*CONVOLUTIONS, strict=True)]
    names = ("height", "width", "kernel_height", "kernel_width", "channels", "filters", "stride")
    product = convolution_product(**dict(zip(names, columns_of, strict=True)))
    layers = [",".join(map(str, sizes)) for sizes in CONVOLUTIONS]
    agree(array, product, *simulated(tmp_path, array, layers, "conv"))
