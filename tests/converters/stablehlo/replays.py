"""Writers of StableHLO for tests, and the results of XLA's cost analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from hespas.converters import load_format
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.graph import Diagnostics, OpGraph, Workload

__all__ = ["FIXTURES", "SHARED", "read_any", "without_program", "write_bytes", "xla_flops"]

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "fixtures"
SHARED = ROOT.parent / "shared" / "data" / "workloads"


class _Computation(Protocol):
    def as_hlo_module(self) -> object: ...


class _Mlir(Protocol):
    def mlir_module_to_xla_computation(
        self, text: str, *, use_tuple_args: bool, return_tuple: bool
    ) -> _Computation: ...


class _Api(Protocol):
    mlir: _Mlir

    def hlo_module_cost_analysis(self, client: object, module: object) -> Mapping[str, float]: ...


class _Clients(Protocol):
    def make_cpu_client(self) -> object: ...


@cache
def _api() -> _Api:
    return cast("_Api", import_module("jaxlib._jax"))


@cache
def _client() -> object:
    return cast("_Clients", import_module("jaxlib.xla_client")).make_cpu_client()


def xla_flops(program: str) -> float:
    """FLOPs of the HLO that XLA makes of a program, before it optimises."""
    made = _api().mlir.mlir_module_to_xla_computation(program, use_tuple_args=False, return_tuple=False)
    totals = _api().hlo_module_cost_analysis(_client(), made.as_hlo_module())
    return float(totals.get("flops", 0.0))


def read_any(path: Path, name: str) -> Workload:
    """A workload of the format called ``name``."""
    read = load_format(name).read
    assert read is not None
    value = read(path, ReadOptions(), Diagnostics())
    assert isinstance(value, Workload)
    return value


def without_program(workload: Workload) -> Workload:
    """The same graphs without the program they came from."""

    def bare(graph: OpGraph) -> OpGraph:
        return replace(graph, attachments={})

    return replace(workload, classes=tuple(map(bare, workload.classes)))


def write_bytes(
    workload: Workload, path: Path, options: WriteOptions | None = None
) -> tuple[bytes, Diagnostics]:
    """The file that is written, and what was found to say."""
    found = Diagnostics()
    write = load_format("stablehlo").write
    assert write is not None
    write(workload, path, options or WriteOptions(name=path.name), found)
    return path.read_bytes(), found
