"""CPU time of estimates of a million operations by the composite: ``python -m benchmarks.estimate_speed``.

The benchmark generates the program: 250 layers of different sizes, each called a hundred times. The composite
estimates distinct operations once. The floor fills the columns of an estimate once. Exits with 1 above ten
CPU seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas import api
from hespas.estimators import load_estimator
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.hardware import load_device

__all__ = ["main", "program"]

_LAYERS, _CALLS = 250, 100
_BOUND_S = 10.0


def _layer(number: int) -> str:
    """Return the text of a function with 40 operations, whose sizes differ from all other layers."""
    width = 64 * (8 + number)
    tokens = 128 * (1 + number % 16)
    rows, weights = f"tensor<{tokens}x{width}xbf16>", f"tensor<{width}x{width}xbf16>"
    lines = [f"func.func private @layer{number}(%v0: {rows}, %w: {weights}) -> {rows} {{"]
    for step in range(0, 40, 4):
        here, names = f"%v{step}", [f"%v{step + each}" for each in range(1, 5)]
        product = f"stablehlo.dot_general {here}, %w, contracting_dims = [1] x [0]"
        lines += [
            f"{names[0]} = {product} : ({rows}, {weights}) -> {rows}",
            f"{names[1]} = stablehlo.tanh {names[0]} : {rows}",
            f"{names[2]} = stablehlo.add {names[1]}, {here} : {rows}",
            f"{names[3]} = stablehlo.multiply {names[2]}, {names[0]} : {rows}",
        ]
    return "\n".join([*lines, f"return %v40 : {rows} }}"])


def program(layers: int = _LAYERS, calls: int = _CALLS) -> str:
    """Return the text of a program with ``layers`` x ``calls`` x 40 operations after its calls are
    expanded.
    """
    arguments: list[str] = []
    body: list[str] = []
    for number in range(layers):
        width, tokens = 64 * (8 + number), 128 * (1 + number % 16)
        rows, weights = f"tensor<{tokens}x{width}xbf16>", f"tensor<{width}x{width}xbf16>"
        arguments += [f"%x{number}_0: {rows}", f"%w{number}: {weights}"]
        body += [
            f"%x{number}_{call + 1} = func.call @layer{number}(%x{number}_{call}, %w{number}) : "
            f"({rows}, {weights}) -> {rows}"
            for call in range(calls)
        ]
    head = f"func.func @main({', '.join(arguments)}) {{"
    functions = [_layer(number) for number in range(layers)]
    return "\n".join(["module @layers {", *functions, head, *body, "return }", "}"])


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _graph(layers: int) -> OpGraph:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layers.mlir"
        path.write_text(program(layers), encoding="utf-8")
        workload = api.read(path)
    assert isinstance(workload, Workload)
    return workload.classes[0]


def main() -> int:
    """Measure and print. Return 1 if the bound is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=_LAYERS)
    parser.add_argument("--hardware", default="H100-SXM")
    options = parser.parse_args()
    graph, device = _graph(options.layers), load_device(options.hardware)
    nodes = len(graph.kind)
    composite = load_estimator("composite")
    found = Diagnostics()
    first = _seconds(lambda: composite.estimate(graph, device, found))
    again = _seconds(lambda: composite.estimate(graph, device, Diagnostics()))
    roofline = _seconds(lambda: load_estimator("roofline").estimate(graph, device, Diagnostics()))
    floor = _seconds(lambda: [np.full(nodes, np.nan) for _ in range(4)])
    print(f"{nodes:,} operations on {device.name}")
    print(
        f"  composite  {first:7.3f} s CPU, again {again:.3f} s  ({first / max(floor, 1e-9):,.0f} x the floor)"
    )
    print(f"  roofline   {roofline:7.3f} s CPU")
    print(f"  floor      {floor:7.3f} s CPU")
    return 0 if first <= _BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
