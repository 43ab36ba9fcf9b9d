"""A tidy table of one's own: ``hardware``, ``kind``, ``dtype``, a time, and the dimensions of the kind."""

from __future__ import annotations

import numpy as np

from hespas.estimators.measurements.columns import Columns
from hespas.estimators.measurements.made import Dialect, Made, made_of, scheme_of
from hespas.estimators.operations import KINDS, Labels, Operations, build, canonical_op, chosen
from hespas.graph.columns import FloatArray
from hespas.graph.errors import FormatError

__all__ = ["TIDY", "tidy_operations"]

_UNITS_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_SUPPORTED = ("matmul", "vector", "normalization", "reduction", "move", "gather", "pooling", "collective")


def _duration_us(columns: Columns) -> FloatArray:
    for unit, factor in _UNITS_US.items():
        for stem in ("duration", "latency"):
            if f"{stem}_{unit}" in columns.names:
                return columns.numbers(f"{stem}_{unit}") * factor
    raise FormatError(
        "no column of times",
        path=str(columns.path),
        hint="call it duration_ns, duration_us, duration_ms or duration_s",
    )


def _of_kind(columns: Columns, kind: str) -> Operations:
    scheme, count = scheme_of(columns), len(columns)
    op = columns.texts("op", "")
    op = Labels(op.row, tuple(canonical_op(name) for name in op.names))
    variant = columns.texts("variant", "")
    sizes = {name: columns.numbers(name, 1.0 if name == "batch" else np.nan) for name in KINDS[kind]}
    if kind == "matmul":
        return build.matmuls(scheme, variant=variant, **sizes)
    if kind == "collective":
        return build.collectives(scheme, op=op, variant=variant, **sizes)
    return build.elementwise(
        kind,
        scheme,
        op=op,
        passes=columns.numbers("passes", 2.0),
        flops_per_element=np.ones(count),
        variant=variant,
        **sizes,
    )


def tidy_operations(columns: Columns) -> Operations:
    """The operations of a table with columns ``kind`` and ``dtype``. Raises ``FormatError``."""
    kind = columns.texts("kind")
    unknown = sorted(set(kind.used()) - set(_SUPPORTED))
    if unknown:
        raise FormatError(
            f"column 'kind' holds {', '.join(map(repr, unknown[:5]))}",
            path=str(columns.path),
            hint=f"known are {', '.join(_SUPPORTED)}",
        )
    made: Operations | None = None
    for name in kind.used():
        part = _of_kind(columns, name)
        is_mine = np.zeros(len(columns), np.bool_)
        is_mine[kind.where(name)] = True
        made = part if made is None else chosen(made, part, is_mine)
    if made is None:
        raise FormatError("the table has no rows", path=str(columns.path))
    return made


def _tidy(columns: Columns) -> Made:
    return made_of(tidy_operations(columns), _duration_us(columns))


TIDY = (
    Dialect(
        title="a tidy table",
        marks=frozenset({"hardware", "kind", "dtype"}),
        make=_tidy,
        provenance="the table itself",
    ),
)
"""One's own measurements."""
