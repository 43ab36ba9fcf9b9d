"""Traces are encoded some nodes at a time: the bytes do not depend on how many, and memory does not grow with
the columns of the whole trace.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.converters.chakra.expansion import ClassWriter
from hespas.converters.chakra.readiness import distinct
from hespas.graph import GraphBuilder, OpClass, OpGraph, Workload, dtype

FIXTURES = Path(__file__).parents[3] / "fixtures"
PARTS = "hespas.converters.chakra.from_graph.NODES_AT_ONCE"
SOURCES = (
    "stablehlo/llama_fsdp_tp_local_N8.mlir.gz",
    "hlo/llama_fsdp_tp_global_N8.hlo.txt.gz",
    "stablehlo/hand_async.mlir",
    "chakra/pipeline_2x2",
)


def _written(source: Path, folder: Path) -> dict[str, bytes]:
    workload = hespas.read(source)
    assert isinstance(workload, Workload)
    hespas.write(workload, folder, format="chakra")
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("name", SOURCES)
def test_bytes_do_not_depend_on_the_parts(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = _written(FIXTURES / name, tmp_path / "whole")
    monkeypatch.setattr(PARTS, 5)
    (tmp_path / "parts").mkdir()
    assert _written(FIXTURES / name, tmp_path / "parts" / "whole") == whole


def _chain(nodes: int) -> OpGraph:
    builder = GraphBuilder("chain")
    add, floats = builder.strings.add("add"), builder.types.add(dtype("f32"), (64, 64))
    for node in range(nodes):
        builder.add_node(
            name_id=builder.strings.add(f"op.{node}"),
            op_id=add,
            op_class=OpClass.ELEMENTWISE,
            data_deps=(node - 1,) if node else (),
            operands=(floats,),
            results=(floats,),
            flops=4096.0,
            bytes_read=16384.0,
            bytes_written=16384.0,
        )
        builder.set(node, duration_ns=1500.0 + node % 97)
    return builder.build()


def test_memory_is_that_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a whole trace took 700 bytes a node, those of its encoding as much again."""
    nodes = 30_000
    writer = ClassWriter(_chain(nodes))
    monkeypatch.setattr(PARTS, 1000)
    tracemalloc.start()
    try:
        size = sum(len(piece) for piece in writer.pieces((0,)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 250 * nodes
    assert peak < 200 * nodes
    assert writer.inexact["chakra.sub-microsecond"] == 0


@pytest.mark.parametrize("numbers", [[], [7], [5, 3, 5, 4], [10**12, 3, 10**12], [0, 0, 1]])
def test_distinct_numbers(numbers: list[int]) -> None:
    used, which = distinct(np.array(numbers, np.int64))
    assert used.tolist() == sorted(set(numbers))
    assert used[which].tolist() == numbers
