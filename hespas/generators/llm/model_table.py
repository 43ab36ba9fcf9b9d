"""Models from a table with a row each, beside a table of published runs: ``models.csv``.

Columns: ``model, layers, hidden, ffn, heads, kv_heads, head_dim, vocab, tied_embeddings, gated_mlp,
attention, q_lora, kv_lora, qk_nope, qk_rope, v_dim, experts, topk, moe_ffn, shared_ffn, dense_layers,
mtp_layers, sliding_window, sliding_pattern, source``. Norms and positions are not stated: those of Llama are
taken.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import convert

from hespas.files.documents import check_column_names
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.generators.llm.model import Model
from hespas.generators.llm.model_file import ModelFile, model_of
from hespas.graph.errors import FormatError, UnsupportedError, clipped

__all__ = ["model_in_table"]

_NEEDED = ("layers", "hidden", "ffn", "heads", "vocab")
_LATENT = ("kv_lora", "qk_nope", "qk_rope", "v_dim")
_ATTENTION = ("", "mha", "gqa", "mqa", "mla")
_COUNTS: Mapping[str, str] = {
    "kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "q_lora": "q_lora",
    "kv_lora": "kv_lora",
    "qk_nope": "nope_dim",
    "qk_rope": "rope_dim",
    "v_dim": "v_dim",
    "experts": "experts",
    "topk": "topk",
    "moe_ffn": "moe_ffn",
    "shared_ffn": "shared_ffn",
    "dense_layers": "dense_layers",
    "mtp_layers": "mtp_layers",
}
"""Columns that may be empty, but for those of its sizes where attention is latent (``mla``), and the keys of
a model file that they are.
"""


def model_in_table(table: Path, name: str) -> Model | None:
    """The model of that name; None where there is no such table, or no such row in it. Raises
    ``UnsupportedError`` where its row does not say all that a model needs, ``FormatError`` for cells that
    are no numbers.
    """
    if not table.exists():
        return None
    try:
        text = read_document(table, limits().report_bytes, "a table of models").decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        check_column_names(reader.fieldnames or (), table)
        rows = list(enumerate(reader))
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"cannot be read: {error}", path=str(table)) from error
    found = next(((number, row) for number, row in rows if row.get("model") == name), None)
    if found is None:
        return None
    cells = {column: (value or "").strip() for column, value in found[1].items() if isinstance(column, str)}
    return _model(cells, table, f"row {found[0]}")


def _model(cells: Mapping[str, str], table: Path, place: str) -> Model:
    name = cells["model"]
    attention = cells.get("attention", "")
    needed = (*_NEEDED, *_LATENT) if attention == "mla" else _NEEDED
    absent = [column for column in needed if not cells.get(column)]
    if absent or attention not in _ATTENTION:
        why = f"{', '.join(absent)} not stated" if absent else f"attention is {clipped(attention)}"
        raise UnsupportedError(
            f"the configuration of model {clipped(name)!r} is not known: {why}",
            path=str(table),
            position=place,
            hint="describe it in a .toml file",
        )
    counts = {column: column for column in _NEEDED} | {
        column: key for column, key in _COUNTS.items() if cells.get(column)
    }
    sizes = {key: _count(cells, column, table, place) for column, key in counts.items()}
    limit, windows = _limits(cells, table, place)
    gated = cells.get("gated_mlp", "yes") != "no"
    stated = {
        "name": name,
        "source": cells.get("source", ""),
        "gated": gated,
        "activation": "silu" if gated else "gelu",
        "tied": cells.get("tied_embeddings") == "yes",
        "windows": windows,
    }
    return model_of(convert(stated | limit | sizes, ModelFile), table)


def _count(cells: Mapping[str, str], column: str, table: Path, place: str) -> int:
    text = cells[column]
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise FormatError(
            f"{clipped(text)!r} is no count", path=str(table), position=f"{place}, column {column}"
        )
    return int(text)


def _limits(cells: Mapping[str, str], table: Path, place: str) -> tuple[dict[str, int], str]:
    """Window or chunk, and which layers have it: ``alternating``, ``5 local : 1 global``, ``on 3 of 4
    layers``.
    """
    if not cells.get("sliding_window"):
        return {}, ""
    pattern = cells.get("sliding_pattern", "")
    local, every = (
        re.search(r"\b(\d{1,3}) local", pattern),
        re.search(r"\b(\d{1,3}) of (\d{1,3}) layers", pattern),
    )
    count = _count(cells, "sliding_window", table, place)
    key = "chunk" if "chunk" in pattern else "window"
    if every:
        limited, period = int(every[1]), int(every[2])
    elif "alternating" in pattern or local:
        limited = int(local[1]) if local else 1
        period = limited + 1
    else:
        return {key: count}, ""
    if not 0 < limited < period <= 100:
        raise FormatError(f"{clipped(pattern)!r} is no pattern of layers", path=str(table), position=place)
    return {key: count}, "L" * limited + "G" * (period - limited)
