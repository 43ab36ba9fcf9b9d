"""Share of doubled sizes whose estimate falls: ``python -m benchmarks.carry_over.doublings [--tables DIR]``.

Doubles each size of random operations in turn, on every device. A line has the share of doublings in which
the estimate falls by more than 5 %, and the smallest ratio. ``--tables`` prints the same of measured times,
for pairs of rows that differ by a factor of two in one size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hespas.estimators import load_estimator
from hespas.estimators.interface import OperationModel
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, device_names, load_device
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, Operations, build

__all__ = ["KINDS", "falls", "main", "measured_falls"]

_FALLS = 0.95
_TABLES = ("aiconfigurator_gemm", "vidur_compute", "neusight_perop", "aiter_gemm", "tpuv4_matmul")
_SIZES = ("batch", "m", "n", "k")


def _matmuls(sizes: FloatArray, scheme: Labels) -> Operations:
    m, n, k = sizes.T
    return build.matmuls(scheme, batch=np.ones(len(m)), m=m, n=n, k=k)


def _prompts(sizes: FloatArray, scheme: Labels) -> Operations:
    batch, heads, length = sizes.T
    same = np.full(len(batch), 1.0)
    return build.attention_context(
        scheme,
        batch=batch,
        length=length,
        heads=heads,
        kv_heads=np.minimum(heads, 8),
        head_dim=128 * same,
        window=0 * same,
        kv_bytes=2 * same,
    )


def _tokens(sizes: FloatArray, scheme: Labels) -> Operations:
    batch, heads, length = sizes.T
    same = np.full(len(batch), 1.0)
    return build.attention_generation(
        scheme,
        batch=batch,
        kv_len=length,
        heads=heads,
        kv_heads=np.minimum(heads, 8),
        head_dim=128 * same,
        kv_bytes=2 * same,
    )


def _additions(sizes: FloatArray, scheme: Labels) -> Operations:
    rows, columns = sizes.T
    return build.elementwise(
        "vector",
        scheme,
        op=Labels.constant("add", len(rows)),
        rows=rows,
        columns=columns,
        passes=np.full(len(rows), 3.0),
        flops_per_element=np.ones(len(rows)),
    )


KINDS: dict[str, tuple[Callable[[FloatArray, Labels], Operations], tuple[tuple[int, int], ...]]] = {
    "matmul": (_matmuls, ((1, 32768), (32, 16384), (32, 16384))),
    "attention.context": (_prompts, ((1, 64), (1, 64), (16, 16384))),
    "attention.generation": (_tokens, ((1, 512), (1, 64), (16, 65536))),
    "vector": (_additions, ((1, 65536), (1, 16384))),
}
"""Builder of the operations of each kind, and the range of each size before it is doubled."""


def _drawn(bounds: Sequence[tuple[int, int]], count: int, seed: int) -> FloatArray:
    """Return random sizes of shape ``(count, sizes)``: a third powers of two, a third multiples of 64."""
    generator = np.random.default_rng(seed)
    low, high = np.log2(np.array(bounds)).T
    logs = generator.uniform(low, high, (count, len(bounds)))
    sizes, how = np.exp2(logs), generator.random((count, 1))
    plain = np.where(how < 2 / 3, np.ceil(sizes / 64) * 64, np.round(sizes))
    drawn = np.where(how < 1 / 3, np.exp2(np.round(logs)), plain)
    return np.clip(drawn, *np.array(bounds, np.float64).T)


def falls(model: OperationModel, device: Device, kind: str, *, count: int, seed: int = 0) -> FloatArray:
    """Return the time with one size doubled over the time without, of shape ``(count, sizes)``."""
    make, bounds = KINDS[kind]
    sizes = _drawn(bounds, count, seed)
    scheme = Labels.constant("bf16", count)
    before = model.predict(make(sizes, scheme), device).duration_ns
    doubled = np.eye(len(bounds)) + 1
    return np.stack(
        [model.predict(make(sizes * by, scheme), device).duration_ns / before for by in doubled], axis=1
    )


def measured_falls(table: Measurements) -> Iterator[tuple[str, FloatArray]]:
    """Yield by device the times of measured matmuls, over times of matmuls with half of one size."""
    for name in table.hardware.used():
        mine = table.on(name)
        mine = mine.take(mine.ops.kind.where("matmul"))
        found: list[float] = []
        for _, rows in mine.ops.classes():
            sizes = np.stack([mine.ops.dim(each, 1.0)[rows] for each in _SIZES], axis=1)
            all_ns: list[float] = mine.duration_ns[rows].tolist()
            times = dict(zip(_keys(sizes), all_ns, strict=True))
            for by in np.eye(len(_SIZES)) + 1:
                pairs = zip(_keys(sizes * by), all_ns, strict=True)
                found += [times[twice] / time for twice, time in pairs if twice in times]
        if found:
            yield name, np.array(found)


def _keys(sizes: FloatArray) -> list[tuple[float, ...]]:
    rows: list[list[float]] = sizes.tolist()
    return [tuple(row) for row in rows]


def _line(device: str, kind: str, ratio: FloatArray) -> str:
    known = ratio[np.isfinite(ratio)]
    if not len(known):
        return ""
    share = float((known < _FALLS).mean())
    return f"{device:28s} {kind:22s} {len(known):8,d} {share:7.2%} {known.min():6.2f}\n"


def main() -> None:
    """Print a line per device and kind, and per device of each table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--estimator", default="composite", help="estimator to test (default: composite)")
    parser.add_argument("--hardware", action="append", help="devices (default: all)")
    parser.add_argument(
        "--kind", action="append", choices=list(KINDS), help="kinds of operations (default: all)"
    )
    parser.add_argument("--count", type=int, default=2000, help="operations of each kind (default: 2000)")
    parser.add_argument("--tables", type=Path, help="folder of measured tables")
    arguments = parser.parse_args()
    model = load_estimator(arguments.estimator)
    if not isinstance(model, OperationModel):
        parser.error(f"--estimator {arguments.estimator} requires a graph; choose an estimator of operations")
    sys.stdout.write(f"{'device':28s} {'kind':22s} {'n':>8s} {'faster':>7s} {'worst':>6s}\n")
    for name in arguments.hardware or device_names():
        for kind in arguments.kind or KINDS:
            sys.stdout.write(_line(name, kind, falls(model, load_device(name), kind, count=arguments.count)))
            sys.stdout.flush()
    for stem in _TABLES if arguments.tables else ():
        for path in sorted(arguments.tables.glob(f"{stem}.*"))[:1]:
            for name, ratio in measured_falls(read_measurements(path)):
                sys.stdout.write(_line(name, f"measured, {stem}"[:22], ratio))


if __name__ == "__main__":
    main()
