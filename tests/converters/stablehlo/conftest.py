"""Reading StableHLO written inside a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import Diagnostics, OpGraph, Workload

ReadText = Callable[..., tuple[Workload, Diagnostics]]
ReadGraph = Callable[..., OpGraph]


@pytest.fixture
def read_text() -> ReadText:
    """``read_text(program, options)``: workload and diagnostics of a program."""

    def read(program: str | bytes, options: ReadOptions | None = None) -> tuple[Workload, Diagnostics]:
        diagnostics = Diagnostics()
        data = program.encode() if isinstance(program, str) else program
        workload = read_program(data, "test.mlir", options or ReadOptions(), diagnostics)
        return workload, diagnostics

    return read


@pytest.fixture
def read_body(read_text: ReadText) -> ReadGraph:
    """``read_body(arguments, body, results)``: the graph of a function that raises no diagnostics."""

    def read(arguments: str, body: str, results: str) -> OpGraph:
        workload, diagnostics = read_text(f"func.func @main({arguments}) -> {results} {{\n{body}\n}}")
        assert diagnostics.counts() == {}
        return workload.classes[0]

    return read


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[3]


@pytest.fixture(scope="session")
def shared_workloads(repository: Path) -> Path:
    folder = repository.parent / "shared" / "data" / "workloads"
    if not folder.is_dir():
        pytest.skip("the shared sample workloads are not beside the repository")
    return folder
