"""Memory of a graph of a million nodes with two dependencies each: ``python benchmarks/hub_memory.py``.

Prints ``nbytes`` of the columns and the growth of resident memory. Exits with 1 if either exceeds 120 bytes
per node.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import sys
from pathlib import Path

import numpy as np

from hespas.graph import GraphBuilder, NodeKind, OpClass, OpGraph, dtype

__all__ = ["build", "main"]

_BOUND_MB = 120.0
_OPS = ("dot_general", "add", "multiply", "transpose", "reduce", "all_reduce")


def build(nodes: int) -> OpGraph:
    """Return a graph like those of readers: distinct names, few ops and types, costs, two dependencies per
    node.
    """
    builder = GraphBuilder("benchmark")
    ops = [builder.strings.add(op) for op in _OPS]
    types = [builder.types.add(dtype("bf16"), (rows, 128)) for rows in (64, 128, 256)]
    for node in range(nodes):
        builder.add_node(
            name_id=builder.strings.add(f"op.{node}"),
            op_id=ops[node % len(ops)],
            op_class=OpClass.ELEMENTWISE,
            kind=NodeKind.COMPUTE,
            data_deps=(max(node - 1, 0), max(node - 7, 0)) if node else (),
            operands=(types[node % 3], types[(node + 1) % 3]),
            results=(types[node % 3],),
            flops=float(node),
            bytes_read=2.0 * node,
            bytes_written=float(node),
        )
    return builder.build()


def _resident_mb() -> float:
    """Return the resident memory of this process [MB], or its peak on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return pages * resource.getpagesize() / 1e6


def _return_free_memory() -> None:
    """Return free memory of the allocator to the system, so that only the graph is measured."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def main() -> int:
    """Measure and print. Return 1 if the bound is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nodes", type=int, default=1_000_000, help="nodes of the graph (default: %(default)s)"
    )
    nodes = int(parser.parse_args().nodes)
    before = _resident_mb()
    graph = build(nodes)
    _return_free_memory()
    grown = _resident_mb() - before
    columns = graph.nbytes / 1e6
    dependencies = np.diff(graph.data_deps.offsets).mean()
    bound = _BOUND_MB * nodes / 1e6
    print(f"nodes                 {nodes:>12,}  ({dependencies:.2f} dependencies each)")
    print(f"graph.nbytes          {columns:>12.1f} MB")
    print(f"resident memory grew  {grown:>12.1f} MB")
    print(f"bound                 {bound:>12.1f} MB")
    return 0 if columns <= bound and grown <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
