"""Tidy tables of measured operations from a formula, so that the expected fit is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

__all__ = ["HEADER", "Time", "matmul_row", "products", "vector_row", "vectors", "write_table"]

HEADER = "hardware,kind,op,dtype,variant,batch,m,n,k,rows,columns,split,duration_us"

Time = Callable[[float, float], float]
"""Time [us] from FLOPs and bytes."""


def matmul_row(hardware: str, size: tuple[int, int, int], time_us: float, split: str = "") -> str:
    m, n, k = size
    return f"{hardware},matmul,,bf16,lib 1,1,{m},{n},{k},,,{split},{time_us!r}"


def vector_row(hardware: str, op: str, size: tuple[int, int], time_us: float, split: str = "") -> str:
    return f"{hardware},vector,{op},f32,lib 1,,,,,{size[0]},{size[1]},{split},{time_us!r}"


def products(
    hardware: str, time: Time, sizes: Sequence[int] = (256, 512, 1024, 2048), *, split: str = ""
) -> list[str]:
    """All products with these extents; ``time`` of FLOPs and bytes."""
    found: list[str] = []
    for m, n, k in product(sizes, repeat=3):
        flops, moved = 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n)
        found.append(matmul_row(hardware, (m, n, k), time(flops, moved), split))
    return found


def vectors(hardware: str, ops: Sequence[str], time: Time, *, split: str = "", sizes: int = 20) -> list[str]:
    """Return rows of each operation at ``sizes`` sizes; ``add`` reads two operands, all others one."""
    return [
        vector_row(
            hardware, op, (rows, 1024), time(rows * 1024.0, rows * 1024.0 * (12 if op == "add" else 8)), split
        )
        for op in ops
        for rows in range(128, 128 * (sizes + 1), 128)
    ]


def write_table(path: Path, rows: Sequence[str]) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path
