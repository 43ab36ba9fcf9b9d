"""Matrix products and convolutions as an attribute: ``1x128x512x256 bf16*bf16>f32``, and back.

Extents are batch, M, N and K; element types those of both operands and of the accumulator (``?`` unknown).
Behind them stands what does not follow from the extents: ``flops=``, ``useful=`` and ``products=``. A fusion
that holds several has them with ``;`` between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from hespas.converters.chakra.spans import Longs
from hespas.graph import DTYPES, ContractionTable, OpGraph, find_dtype

__all__ = ["LARGEST_EXTENT", "contraction_texts", "parse_contractions"]

_UNKNOWN = "?"
LARGEST_EXTENT = 1 << 62
_FLOPS_PER_MULTIPLY_ADD = 2
_ELEMENT = r"(\?|[A-Za-z0-9_]+(?:<f\d+>)?)"
_FIGURE = r"nan|-?\d{1,400}(?:\.\d{1,400})?(?:e[+-]?\d{1,3})?"
_TEXT = re.compile(
    rf"(-?\d{{1,19}})x(-?\d{{1,19}})x(-?\d{{1,19}})x(-?\d{{1,19}}) {_ELEMENT}\*{_ELEMENT}>{_ELEMENT}"
    rf"(?: flops=({_FIGURE}))?(?: useful=({_FIGURE}))?(?: products=(\d{{1,3}}))?"
)


@dataclass(frozen=True, slots=True)
class _Contraction:
    """One row of the table."""

    batch: int
    m: int
    n: int
    k: int
    lhs: int
    rhs: int
    accumulator: int
    flops: float
    useful_flops: float
    products: int

    @property
    def usual_flops(self) -> float:
        """What the extents say."""
        return float(_FLOPS_PER_MULTIPLY_ADD) * self.batch * self.m * self.n * self.k

    def text(self) -> str:
        """The row as text; left out is what the rest implies."""
        text = f"{self.batch}x{self.m}x{self.n}x{self.k} "
        text += f"{_name(self.lhs)}*{_name(self.rhs)}>{_name(self.accumulator)}"
        text += f" flops={self.flops!r}" if self.flops != self.usual_flops else ""
        text += f" useful={self.useful_flops!r}" if _differ(self.useful_flops, self.flops) else ""
        return text + (f" products={self.products}" if self.products != 1 else "")

    @classmethod
    def parse(cls, text: str) -> _Contraction | None:
        """The row that a text says, None where it is not of this form."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        batch, m, n, k = (int(part) for part in match.groups()[:4])
        lhs, rhs, accumulator = (_code(part) for part in match.groups()[4:7])
        too_large = max(abs(batch), abs(m), abs(n), abs(k)) > LARGEST_EXTENT
        if lhs is None or rhs is None or accumulator is None or too_large:
            return None
        row = cls(batch, m, n, k, lhs, rhs, accumulator, 0.0, 0.0, int(match[10] or 1))
        flops = float(match[8]) if match[8] else row.usual_flops
        useful = float(match[9]) if match[9] else flops
        return replace(row, flops=flops, useful_flops=useful)


def _differ(one: float, other: float) -> bool:
    """Whether two figures differ; unknown is the same as unknown."""
    return one != other and not (np.isnan(one) and np.isnan(other))


def _name(code: int) -> str:
    return DTYPES[code].name if code >= 0 else _UNKNOWN


def _code(name: str) -> int | None:
    if name == _UNKNOWN:
        return -1
    found = find_dtype(name)
    return found.code if found is not None and found.name == name else None


def contraction_texts(graph: OpGraph) -> tuple[Longs, list[bytes], Longs]:
    """The nodes that hold contractions, the distinct texts, and which of them each node has."""
    table = graph.contractions
    columns = (
        table.batch,
        table.m,
        table.n,
        table.k,
        table.lhs,
        table.rhs,
        table.accumulator,
        table.flops,
        table.useful_flops,
        table.products,
    )
    texts: dict[int, str] = {}
    for node, *values in zip(table.node.tolist(), *(column.tolist() for column in columns), strict=True):
        text = _Contraction(*values).text()
        texts[node] = f"{texts[node]};{text}" if node in texts else text
    distinct = {text: place for place, text in enumerate(dict.fromkeys(texts.values()))}
    which = np.array([distinct[text] for text in texts.values()], np.int64)
    return np.array(list(texts), np.int64), [text.encode() for text in distinct], which


def parse_contractions(nodes: Longs, texts: list[str], place: Longs) -> tuple[ContractionTable, Longs]:
    """The table of nodes that have ``texts[place]``, and which places of ``nodes`` are not of this form."""
    known = [_parsed(text) for text in texts]
    places: list[int] = place.tolist()
    owners: list[int] = nodes.tolist()
    rows = [known[which] for which in places]
    found = [(node, row) for node, each in zip(owners, rows, strict=True) for row in each or ()]
    foreign = np.array([index for index, each in enumerate(rows) if each is None], np.int64)
    if not found:
        return ContractionTable.empty(), foreign
    parts = [row for _, row in found]
    return ContractionTable(
        node=np.array([node for node, _ in found], np.int32),
        batch=np.array([row.batch for row in parts], np.int64),
        m=np.array([row.m for row in parts], np.int64),
        n=np.array([row.n for row in parts], np.int64),
        k=np.array([row.k for row in parts], np.int64),
        flops=np.array([row.flops for row in parts], np.float64),
        useful_flops=np.array([row.useful_flops for row in parts], np.float64),
        lhs=np.array([row.lhs for row in parts], np.int16),
        rhs=np.array([row.rhs for row in parts], np.int16),
        accumulator=np.array([row.accumulator for row in parts], np.int16),
        products=np.array([row.products for row in parts], np.uint8),
    ), foreign


def _parsed(text: str) -> tuple[_Contraction, ...] | None:
    """The rows of one node, None where the text would not be written again as it is."""
    rows = [_Contraction.parse(part) for part in text.split(";")]
    known = tuple(row for row in rows if row is not None)
    same = len(known) == len(rows) and ";".join(row.text() for row in known) == text
    return known if same and all(row.products <= 255 for row in known) else None
