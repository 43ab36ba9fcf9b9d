"""Costs of kernels that a compiler states, and estimates for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from hespas.analysis.operations import OperationRow
from hespas.api.analysis import Analysis
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto

SIZE = 1 << 20
INPUTS: Json = {
    "Input Dims": [[SIZE], [SIZE], []],
    "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
    "Concrete Inputs": ["", "", str(SIZE)],
    "kernel_backend": "triton",
    "kernel_file": "torchinductor/ab/cab.py",
    "kernel_hash": "cab",
}
GUESSED = "measured-ops.guessed-update"


def analyzed(folder: Path, name: str, facts: Json) -> Analysis:
    events = [
        host(name, 0, 9, 1, {**INPUTS, **facts}),
        launch(2, 1),
        kernel(name, 20, 50, 1),
    ]
    properties: Json = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}
    return hespas.analyze(write_kineto(folder / "r.pt.trace.json", events, **properties))


def row_of(done: Analysis) -> OperationRow:
    (row,) = done.tables.operations.rows()
    return row


@pytest.mark.parametrize("name", ["triton_tem_fused_attention_like_3", "triton_poi_fused_add_mul_0"])
def test_stated_costs_replace_guesses(name: str, tmp_path: Path) -> None:
    done = analyzed(tmp_path, name, {"kernel_flop": 3_000_000_000, "kernel_num_gb": 0.0125})
    row = row_of(done)
    assert row.flops == 3e9
    assert row.bytes_moved == pytest.approx(12.5e6)
    assert GUESSED not in done.diagnostics.counts()


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"kernel_flop": None, "kernel_num_gb": None},
        {"kernel_flop": 0, "kernel_num_gb": 0},
        {"kernel_flop": "many", "kernel_num_gb": [1]},
    ],
)
def test_without_stated_costs_names_and_sizes_count(facts: Json, tmp_path: Path) -> None:
    """An addition of two tensors reads both: one of them is updated, which is a guess."""
    done = analyzed(tmp_path, "triton_poi_fused_add_0", facts)
    row = row_of(done)
    assert row.flops == SIZE
    assert row.bytes_moved == 3 * SIZE * 2
    assert done.diagnostics.counts()[GUESSED] == 1


def test_a_kernel_whose_sizes_show_the_update_is_no_guess(tmp_path: Path) -> None:
    dims: Json = {"Input Dims": [[SIZE // 512, 512], [512], []]}
    done = analyzed(tmp_path, "triton_poi_fused_gelu_0", dims)
    assert row_of(done).bytes_moved == 2 * SIZE * 2 + 512 * 2
    assert GUESSED not in done.diagnostics.counts()
