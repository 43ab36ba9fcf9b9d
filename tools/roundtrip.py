"""Round trips of ``fixtures/`` through all pairs of formats: ``roundtrip.md`` and its test's golden file.

``python -m tools.roundtrip [--check]`` writes both. Review the differences before you commit them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hespas.validators.roundtrip import (
    QUANTISED_TYPES,
    ColumnResult,
    ColumnStatus,
    MatrixCell,
    RoundTrips,
    cell_text,
    roundtrip,
)
from tools.documents import ROOT, document_command

__all__ = ["GOLDEN", "golden_document", "main", "roundtrip_document"]

GOLDEN = ROOT / "tests" / "validators" / "roundtrip" / "matrix.json"
_INTRODUCTION = """# Round trips

This page shows which conversions between formats lose information. Each file in `fixtures/` was converted
to another format and back, and compared. Made by `python -m tools.roundtrip`; do not edit. For your own
files: `hespas-validate roundtrip PATH... --html kept.html`.

A row of the matrix is the format of a file, a column the format that it is converted to and back from. If
the format of the row cannot be written, the conversion is one way. A cell counts the attributes of the
graph that differ afterwards: *lost* attributes are empty, *changed* attributes differ for some operations.
Flat formats (Chakra) have no loops or zero-cost operations, and the conversion removes them; the comparison
uses the graph after this change. Every loss in these tables is also reported by the conversion itself.
"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _listed(columns: Iterable[ColumnResult]) -> str:
    """Return the columns as text with their numbers of rows; ``p2p`` for all equal columns of that table."""
    found: dict[str, int] = {}
    for column in columns:
        name = column.column.partition(".")[0]
        found[name] = max(found.get(name, 0), column.changed)
    return ", ".join(f"`{name}` {count:,}" for name, count in found.items()) or "-"


_QUANTISED_INTRODUCTION = """## Quantised types

A row counts the operations with quantised operands or results (`!quant.uniform<...>`, with storage type,
range, scales and zero points), and those whose types are all the same afterwards. A graph that was read
from StableHLO is written as its original program, with all types. A program that is written anew, from a
trace or a changed graph, computes in the storage types, because XLA has no quantised types. Attributes of its
operations state the quantised types; an operation that others replace states only the types of its results.
"""


def _quantised(cells: Iterable[MatrixCell]) -> Iterable[Sequence[str]]:
    for cell in cells:
        for column in cell.columns:
            if column.column == QUANTISED_TYPES and column.known:
                kept = column.known - column.changed
                yield (cell.source, cell.via, f"{column.known:,}", f"{kept:,}", f"{kept / column.known:.0%}")


def _details(cells: Iterable[MatrixCell]) -> Iterable[Sequence[str]]:
    for cell in cells:
        if not (cell.lost or cell.changed or cell.refused):
            continue
        refused = "; ".join(f"{count}: {message}" for message, count in sorted(cell.refused.items())) or "-"
        yield (cell.source, cell.via, str(cell.compared), _listed(cell.lost), _listed(cell.changed), refused)


def roundtrip_document(done: RoundTrips) -> str:
    """Return ``roundtrip.md``."""
    texts = {(cell.source, cell.via): cell_text(cell).text for cell in done.cells}
    sources = list(dict.fromkeys(source for source, _ in texts))
    targets = list(dict.fromkeys(via for _, via in texts))
    matrix = _table(
        ("from \\ through", *(f"`{via}`" for via in targets)),
        ((f"`{source}`", *(texts.get((source, via), "") for via in targets)) for source in sources),
    )
    details = _table(
        ("from", "through", "files", "lost, rows", "changed, rows", "files refused"), _details(done.cells)
    )
    quantised = _table(("from", "through", "operations", "kept", "share"), _quantised(done.cells))
    return f"{_INTRODUCTION}\n{matrix}\n{_QUANTISED_INTRODUCTION}\n{quantised}\n## Losses\n\n{details}"


def golden_document(done: RoundTrips) -> str:
    """Return all cells and columns that are not exact as JSON, for the test."""
    document = {
        f"{cell.source} -> {cell.via}": {
            "verdict": cell_text(cell).text,
            "files": {"compared": cell.compared, "written": cell.written, "refused": cell.refused},
            "not kept": {
                column.column: f"{column.kept.value}: {column.changed} of {column.known}"
                for column in cell.columns
                if column.kept in {ColumnStatus.CHANGED, ColumnStatus.LOST}
            },
        }
        for cell in done.cells
    }
    return json.dumps(document, indent=1) + "\n"


def _documents() -> Mapping[Path, str]:
    done = roundtrip([ROOT / "fixtures"], jobs=2)
    return {
        ROOT / "docs" / "accuracy" / "roundtrip.md": roundtrip_document(done),
        GOLDEN: golden_document(done),
    }


def main() -> int:
    """Write the page and the golden file; return 1 if one is stale with ``--check``."""
    return document_command(__doc__, _documents)


if __name__ == "__main__":
    sys.exit(main())
