"""Test bench for small programs: text as input; graphs, times and traces through the public functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

import hespas
from hespas.cli import convert
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.hardware import load_device
from tests.chakra_messages import reference_messages

__all__ = [
    "A100",
    "Bench",
    "all_reduce",
    "ancestors",
    "hespas_convert",
    "longest_path_us",
    "module",
    "only",
    "read_graph",
    "read_workload",
    "times_us",
    "total_us",
    "trace_nodes",
]

A100 = "A100-SXM-40GB"


def module(body: str, arguments: str, results: str, replicas: int = 1, partitions: int = 1) -> str:
    """A module with one function; ``results`` are names and types: ``%0: tensor<4xf32>``."""
    pairs = [part.split(": ", 1) for part in results.split("; ")]
    names, types = ", ".join(pair[0] for pair in pairs), ", ".join(pair[1] for pair in pairs)
    devices = f"mhlo.num_replicas = {replicas} : i32, mhlo.num_partitions = {partitions} : i32"
    return (
        f"module @trap attributes {{{devices}}} {{\n"
        f"func.func public @main({arguments}) -> ({types}) {{\n{body}\nreturn {names} : {types}\n}}\n}}\n"
    )


def all_reduce(
    result: str, operand: str, tensor: str, groups: str = "[[0, 1, 2, 3]]", of: str = "1x4"
) -> str:
    return f"""{result} = "stablehlo.all_reduce"({operand}) <{{
        replica_groups = dense<{groups}> : tensor<{of}xi64>}}> ({{
      ^bb0(%left: tensor<f32>, %right: tensor<f32>):
        %sum = stablehlo.add %left, %right : tensor<f32>
        stablehlo.return %sum : tensor<f32>
      }}) : ({tensor}) -> {tensor}\n"""


@dataclass(frozen=True)
class Bench:
    """A working folder: programs as input; graphs, times and traces as output."""

    folder: Path

    def file(self, text: str, name: str = "program.mlir") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def graph(self, text: str, diagnostics: Diagnostics | None = None, name: str = "program.mlir") -> OpGraph:
        return read_graph(self.file(text, name), diagnostics)

    def traces(self, source: str | Path, *options: str) -> Workload:
        """Convert a program with ``hespas-convert``, and read the traces."""
        path = source if isinstance(source, Path) else self.file(source)
        done = hespas_convert(path, self.folder / "traces", "--overwrite", *options)
        assert done.exit_code == 0, done.output
        return read_workload(self.folder / "traces")


def hespas_convert(*arguments: str | Path) -> Result:
    return CliRunner().invoke(convert.app, [str(argument) for argument in arguments])


def read_workload(path: Path, diagnostics: Diagnostics | None = None) -> Workload:
    value = hespas.read(path, diagnostics=diagnostics)
    assert isinstance(value, Workload)
    return value


def read_graph(path: Path, diagnostics: Diagnostics | None = None) -> OpGraph:
    (graph,) = read_workload(path, diagnostics).classes
    return graph


def only(graph: OpGraph, op: str) -> int:
    """The one node of an operation."""
    (node,) = [node for node in range(len(graph)) if graph.op_name(node).endswith(op)]
    return node


def times_us(graph: OpGraph, hardware: str = A100) -> dict[str, float]:
    """Operation -> time without launch overhead; the last one of each name."""
    done = hespas.estimate(Workload.spmd(graph, 1), hardware, estimator="roofline")
    launch_ns = load_device(hardware).launch_overhead_ns
    times: list[float] = ((done.estimates[0].duration_ns - launch_ns) / 1e3).tolist()
    return {graph.op_name(node).removeprefix("stablehlo."): time for node, time in enumerate(times)}


def total_us(graph: OpGraph) -> float:
    done = hespas.estimate(Workload.spmd(graph, 1), A100, estimator="roofline")
    return float(done.estimates[0].duration_ns.sum()) / 1e3


def ancestors(graph: OpGraph, node: int) -> set[int]:
    found: set[int] = set()
    waiting = [node]
    while waiting:
        new = set(graph.data_deps.row(waiting.pop()).tolist()) - found
        found |= new
        waiting += new
    return found


def longest_path_us(graph: OpGraph) -> float:
    ends: list[float] = []
    durations_ns: list[float] = graph.duration_ns.tolist()
    for duration_ns, deps in zip(durations_ns, graph.data_deps.to_lists(), strict=True):
        ends.append(duration_ns + max((ends[dep] for dep in deps), default=0.0))
    return max(ends) / 1e3


def trace_nodes(path: Path) -> Iterator[Any]:
    """The nodes of a trace by the protobuf library: messages behind their lengths, metadata first."""
    make, data = reference_messages().node, path.read_bytes()
    start, end = _frame(data, 0)
    while end < len(data):
        start, end = _frame(data, end)
        yield make.FromString(data[start:end])


def _frame(data: bytes, at: int) -> tuple[int, int]:
    """Return start and end of the message at ``at``."""
    size = shift = 0
    while data[at] & 0x80:
        size, shift, at = size | (data[at] & 0x7F) << shift, shift + 7, at + 1
    start = at + 1
    return start, start + (size | data[at] << shift)
