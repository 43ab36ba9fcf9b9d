"""Figures of compiled programs: ``python -m tools.ahead_of_time [TARGET ...] [--program F --mesh M]``.

The command prints a Markdown table with a column for the program (of the whole mesh, divided evenly) and one
for each target. The table in docs/how-to/capture-compilers.md has GPUs only, because the terms of libtpu do
not state whether figures of its output may be published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hespas.api import read
from hespas.captures.aot import CompiledProgram, ProgramFigures, compile_for, figures_of, workload_of_compiled
from hespas.files.streams import read_bytes
from hespas.graph import Diagnostics, Workload
from hespas.graph.mesh import Mesh
from tools.documents import ROOT

__all__ = ["main", "table"]

_PROGRAM = ROOT / "fixtures" / "stablehlo" / "llama_fsdp_tp_global_N8.mlir.gz"
_MESH = "data=2,model=4"
_TARGETS = ("gpu:a100:8", "gpu:h100:8", "gpu:b200:8")
_MOST_BYTES = 1 << 30
_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_MB = 1e6


def table(program: Path, mesh: Mesh, targets: Sequence[str]) -> str:
    """Return the table, with a line of versions, CPU time and memory of the compilers."""
    given = read(program, diagnostics=Diagnostics())
    if not isinstance(given, Workload):
        raise TypeError(f"{program} is not a program")
    data = read_bytes(program, _MOST_BYTES)
    made = [compile_for(data, target, mesh, diagnostics=Diagnostics()) for target in targets]
    columns = [
        ("program, per device", _cells(figures_of(given), None, mesh.num_devices)),
        *((f"`{each.target}`", _cells(_figures(each), each, 1)) for each in made),
    ]
    names = list(columns[0][1])
    lines = [
        "| " + " | ".join(["", *(title for title, _ in columns)]) + " |",
        "| --- |" + " ---: |" * len(columns),
        *("| " + " | ".join([name, *(cells[name] for _, cells in columns)]) + " |" for name in names),
    ]
    took = ", ".join(f"{each.target} {each.cpu_s:.1f} s" for each in made)
    resident = max(each.peak_rss_bytes for each in made) / _MB
    compilers = ", ".join(dict.fromkeys(each.compiler for each in made))
    lines += ["", f"jax {version('jax')}, {compilers}; CPU time {took}; {resident:,.0f} MB at most."]
    return "\n".join(lines) + "\n"


def _figures(compiled: CompiledProgram) -> ProgramFigures:
    return figures_of(workload_of_compiled(compiled, Diagnostics()))


def _cells(figures: ProgramFigures, compiled: CompiledProgram | None, devices: int) -> dict[str, str]:
    memory = dict[str, int]() if compiled is None else compiled.memory
    return {
        "operations that take time": f"{figures.operations:,.0f}",
        "fusions among them": f"{figures.fusions:,.0f}",
        "products, useful GFLOP": f"{figures.product_flops / devices / 1e9:.6f}",
        **{
            f"`{kind}`, payload": f"{figures.collectives[kind]:,.0f}, "
            f"{figures.collective_bytes[kind] / _MB:.3f} MB"
            if kind in figures.collectives
            else "-"
            for kind in _KINDS
        },
        "concurrent with other work": f"{figures.asynchronous:,.0f}",
        **{
            f"{name} memory": f"{memory[name] / _MB:.3f} MB" if name in memory else "-"
            for name in ("argument", "temp", "peak")
        },
    }


def main(words: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help="targets, such as gpu:h100:8 or tpu:v5e:2x4"
    )
    parser.add_argument("--program", type=Path, default=_PROGRAM, help="StableHLO program with shardings")
    parser.add_argument("--mesh", default=_MESH)
    options = parser.parse_args(words)
    sys.stdout.write(table(options.program, Mesh.of(options.mesh), options.targets or _TARGETS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
