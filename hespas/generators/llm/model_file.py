"""Models described in files: TOML files with the usual names of sizes, and tables with a row per model.

Sizes in a TOML file may be expressions over each other. ``hybrid`` has a letter for each layer of a hybrid
model: M Mamba, * attention, - feed-forward, E experts. ``windows`` is a repeated pattern with a letter for
each layer: L limited by ``window`` (or ``chunk``), G global. The first ``dense_layers`` of a model with
experts have a feed-forward block instead, and of the others every ``moe_every``-th has experts.

A table of models (``models.csv``) is in the folder of a table of published runs. Columns: ``model, layers,
hidden, ffn, heads, kv_heads, head_dim, vocab, tied_embeddings, gated_mlp, attention, q_lora, kv_lora,
qk_nope, qk_rope, v_dim, experts, topk, moe_ffn, shared_ffn, dense_layers, mtp_layers, sliding_window,
sliding_pattern, source``. Norms and positions have no columns: they are assumed to be as in Llama.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, convert

from hespas.costs.expressions import Expression, ExpressionParser, ExpressionToken, FormulaError
from hespas.files.limits import limits
from hespas.files.tables import read_table
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    Model,
    NormKind,
    Positions,
)
from hespas.generators.spec import MOST_COUNT
from hespas.graph.errors import FormatError, UnsupportedError, UsageError, clipped
from hespas.hardware.typed_toml import FileKind, Text, TomlRow, read_rows, toml_error

__all__ = [
    "MOST_LAYERS",
    "PRESETS",
    "ExpressionError",
    "ModelFile",
    "evaluate_sizes",
    "load_model",
    "model_in_table",
    "model_names",
    "model_of",
    "named_model",
]

_MOST = 2**62


class ExpressionError(ValueError):
    """Error in an expression for a size in a model file."""


def _round_up(value: Fraction, multiple: Fraction) -> Fraction:
    return -(-value // multiple) * multiple


_SIZE_FUNCTIONS: Mapping[str, tuple[int, Callable[..., Fraction]]] = {
    "round_up": (2, _round_up),
    "min": (2, min),
    "max": (2, max),
}
"""Name -> number of arguments, and the function."""


class _SizeParser(ExpressionParser[Mapping[str, int]]):
    """Parser of the exact integer expressions over sizes in a model file. ``names`` are the sizes to which an
    expression refers.
    """

    number = Fraction
    functions = _SIZE_FUNCTIONS
    max_characters = 500

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.names: list[str] = []
        self.value = self.parse()

    def name(self, token: ExpressionToken) -> Expression[Mapping[str, int]]:
        """Parse the name of a size."""
        self.names.append(token.text)
        return lambda sizes: Fraction(sizes[token.text])


def evaluate_sizes(sizes: Mapping[str, int | str]) -> dict[str, int]:
    """Return the sizes of a model with all expressions evaluated to whole numbers.

    Raises :class:`ExpressionError` with the name of the size if an expression is invalid, has an unknown
    name, depends on itself, or is not a whole number that can be a count.
    """
    values = {name: _whole(name, Fraction(size)) for name, size in sizes.items() if isinstance(size, int)}
    waiting = {name: _parsed(name, text) for name, text in sizes.items() if not isinstance(text, int)}
    while waiting:
        ready = [name for name, size in waiting.items() if values.keys() >= set(size.names)]
        if not ready:
            raise _unresolved(waiting, sizes)
        for name in ready:
            try:
                values[name] = _whole(name, waiting.pop(name).value(values))
            except ZeroDivisionError as error:
                raise ExpressionError(f"{name}: division by 0") from error
    return values


def _unresolved(waiting: Mapping[str, _SizeParser], sizes: Mapping[str, int | str]) -> ExpressionError:
    """Return the error for expressions in a model file that cannot be evaluated, because of unknown names or
    circular references.
    """
    for name, size in waiting.items():
        for operand in size.names:
            if operand not in sizes:
                close = get_close_matches(operand, sizes, n=1)
                suggestion = f"; did you mean {close[0]!r}?" if close else ""
                return ExpressionError(f"{name}: unknown size {operand!r}{suggestion}")
    path: list[str] = []
    name = next(iter(waiting))
    while name not in path:
        path.append(name)
        name = next(operand for operand in waiting[name].names if operand in waiting)
    circle = path[path.index(name) :]
    return ExpressionError(f"{circle[0]}: {' and '.join(sorted(circle))} depend on each other")


def _parsed(name: str, text: str) -> _SizeParser:
    try:
        return _SizeParser(text)
    except FormulaError as error:
        raise ExpressionError(f"{name}: {error} in the expression {clipped(text)!r}") from error


def _whole(name: str, value: Fraction) -> int:
    if value.denominator != 1 or not 0 <= value <= _MOST:
        shown = f"{float(value):g}" if abs(value) <= _MOST else "beyond 2**62"
        raise ExpressionError(f"{name}: {shown} is not a whole number from 0 to 2**62")
    return int(value)


PRESETS = Path(__file__).parent / "presets.toml"
_ABOUT = FileKind(
    "a model file",
    where="check the path; `hespas generate llm --list` names the models that ship",
    example='name = "mine", hidden = 4096, layers = 32, heads = 32, ffn = "4 * hidden", vocab = 32000',
)
_Size = int | str
_Pattern = Annotated[str, Meta(max_length=4096, description="write letters, one per layer")]


class ModelFile(TomlRow, frozen=True, kw_only=True):
    """Keys of a model file (TOML); sizes are whole numbers or expressions."""

    name: Text
    source: str = ""
    aliases: tuple[Text, ...] = ()
    hidden: _Size
    layers: _Size
    vocab: _Size
    heads: _Size = 1
    kv_heads: _Size = "heads"
    head_dim: _Size = "hidden / heads"
    ffn: _Size = 0
    gated: bool = True
    activation: Literal["silu", "gelu", "relu2"] = "silu"
    bias: bool = False
    tied: bool = False
    norm: NormKind = "rms"
    positions: Positions = "rope"
    max_positions: _Size = 0
    post_norms: bool = False
    qk_norm: bool = False
    window: _Size = 0
    chunk: _Size = 0
    windows: _Pattern = ""
    q_lora: _Size = 0
    kv_lora: _Size = 0
    nope_dim: _Size = 0
    rope_dim: _Size = 0
    v_dim: _Size = 0
    experts: _Size = 0
    topk: _Size = 1
    moe_ffn: _Size = "ffn"
    shared_ffn: _Size = 0
    latent: _Size = 0
    dense_layers: _Size = 0
    moe_every: _Size = 1
    mtp_layers: _Size = 0
    hybrid: _Pattern = ""
    mamba_heads: _Size = 0
    mamba_head_dim: _Size = 64
    mamba_state: _Size = 128
    mamba_groups: _Size = 1
    mamba_conv: _Size = 4
    mamba_chunk: _Size = 128


class _PresetFile(TomlRow, frozen=True, kw_only=True):
    models: tuple[ModelFile, ...]


MOST_LAYERS = 2_000
"""Limit on the layers of a model: its step takes 10 s to predict; published models have up to 128 layers."""


def model_of(file: ModelFile, path: Path = PRESETS) -> Model:
    """Return the model that a file describes. Raises ``FormatError`` that names the wrong key."""
    values = {name: getattr(file, name) for name in file.__struct_fields__}
    sizes = {
        name: value
        for name, value in values.items()
        if (isinstance(value, int) and not isinstance(value, bool)) or name in _SIZES
    }
    try:
        size = evaluate_sizes(sizes)
    except ExpressionError as error:
        key, _, message = str(error).partition(": ")
        raise toml_error(path, key, message, _ABOUT.example) from error
    for key, value in size.items():
        if value > MOST_COUNT:
            raise toml_error(path, key, f"{value:,} is beyond {MOST_COUNT:,}", "a smaller size")
    for key, message, remedy in _faults(file, size):
        raise toml_error(path, key, message, remedy)
    return Model(
        name=file.name,
        hidden=size["hidden"],
        vocab=size["vocab"],
        layers=tuple(_layers(file, size, path)),
        tied=file.tied,
        norm=file.norm,
        positions=file.positions,
        max_positions=size["max_positions"],
        post_norms=file.post_norms,
        mtp_layers=size["mtp_layers"],
        source=file.source,
    )


def _faults(file: ModelFile, size: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """Yield the invalid combinations of keys in a model file: the key, the error and the remedy."""
    needed = ["hidden", "layers", "vocab", "heads", "kv_heads", "head_dim", "topk", "moe_every"]
    needed += ["nope_dim", "v_dim"] if size["kv_lora"] else []
    is_mixed = not size["experts"] or size["dense_layers"] or size["moe_every"] > 1
    needed += ["ffn"] if "-" in file.hybrid or (is_mixed and not file.hybrid) else []
    needed += ["moe_ffn"] if size["experts"] else []
    needed += ["experts"] if "E" in file.hybrid else []
    if "M" in file.hybrid:
        needed += [name for name in size if name.startswith("mamba_")]
    for name in needed:
        if size[name] < 1:
            yield name, f"expected 1 or more, got {size[name]}", f"write it as {name} = 1; {_ABOUT.example}"
    for name in ("layers", "mtp_layers"):
        if size[name] > MOST_LAYERS:
            yield name, f"{size[name]:,} layers exceed the limit of {MOST_LAYERS:,}", "fewer layers"
    if size["heads"] % size["kv_heads"]:
        yield (
            "kv_heads",
            f"{size['heads']} heads do not divide over {size['kv_heads']} key heads",
            "choose a number that divides heads",
        )
    if size["experts"] and size["topk"] > size["experts"]:
        yield "topk", f"a token uses {size['topk']} of {size['experts']} experts", "choose at most experts"
    if size["mamba_heads"] % (size["mamba_groups"] or 1):
        message = f"{size['mamba_heads']} heads do not divide into {size['mamba_groups']} groups"
        yield "mamba_groups", message, "choose a number that divides mamba_heads"
    if file.windows and not size["window"] and not size["chunk"]:
        yield "windows", "limited layers need a window or a chunk", "add window or chunk"


_SIZES = frozenset(name for name, kind in ModelFile.__annotations__.items() if kind == "_Size")
"""The keys whose values may be expressions."""


def _layers(file: ModelFile, size: Mapping[str, int], path: Path) -> Iterator[Layer]:
    blocks = _BlockBuilder(file, size)
    if file.hybrid:
        letters = {"M": blocks.mamba, "E": blocks.experts, "-": blocks.mlp}
        if len(file.hybrid) != size["layers"]:
            message = f"{len(file.hybrid)} letters for {size['layers']} layers"
            raise toml_error(path, "hybrid", message, "write a letter for each layer")
        for letter in file.hybrid:
            if letter != "*" and letter not in letters:
                raise toml_error(path, "hybrid", f"unknown layer {letter!r}", "write letters M, *, - and E")
            yield (blocks.attention(0) if letter == "*" else letters[letter](),)
        return
    if set(file.windows) - set("LG"):
        raise toml_error(
            path,
            "windows",
            f"{clipped(file.windows)} has letters other than L and G",
            'write windows = "LLLG"',
        )
    for layer in range(size["layers"]):
        after_dense = layer - size["dense_layers"]
        is_mixture = size["experts"] > 0 and after_dense >= 0 and (after_dense + 1) % size["moe_every"] == 0
        yield blocks.attention(layer), blocks.experts() if is_mixture else blocks.mlp()


class _BlockBuilder:
    """Builder of a model's blocks from the keys of a model file."""

    def __init__(self, file: ModelFile, size: Mapping[str, int]) -> None:
        self.file, self.size = file, size

    def attention(self, layer: int) -> Block:
        file, size = self.file, self.size
        if size["kv_lora"]:
            return LatentAttention(
                heads=size["heads"], q_lora=size["q_lora"], kv_lora=size["kv_lora"],
                nope_dim=size["nope_dim"], rope_dim=size["rope_dim"], v_dim=size["v_dim"],
            )  # fmt: skip
        limited = not file.windows or file.windows[layer % len(file.windows)] == "L"
        return Attention(
            heads=size["heads"],
            kv_heads=size["kv_heads"],
            head_dim=size["head_dim"],
            window=size["window"] if limited else 0,
            chunk=size["chunk"] if limited else 0,
            qk_norm=file.qk_norm,
            bias=file.bias,
        )

    def mlp(self) -> Block:
        file = self.file
        return Mlp(ffn=self.size["ffn"], gated=file.gated, activation=file.activation, bias=file.bias)

    def experts(self) -> Block:
        file, size = self.file, self.size
        return Experts(
            experts=size["experts"], topk=size["topk"], ffn=size["moe_ffn"], gated=file.gated,
            activation=file.activation, shared_ffn=size["shared_ffn"], latent=size["latent"], bias=file.bias,
        )  # fmt: skip

    def mamba(self) -> Block:
        size = self.size
        return Mamba(
            heads=size["mamba_heads"], head_dim=size["mamba_head_dim"], state=size["mamba_state"],
            groups=size["mamba_groups"], conv=size["mamba_conv"], chunk=size["mamba_chunk"],
        )  # fmt: skip


@cache
def _presets() -> Mapping[str, ModelFile]:
    return {file.name: file for file in read_rows(PRESETS, _PresetFile, _ABOUT)[1].models}


def _folded(name: str) -> str:
    """Return a model name in lower case without punctuation, for comparison: ``llama-3.1-8b`` equals
    ``Llama 3.1 8B``.
    """
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def model_names() -> tuple[str, ...]:
    """Return the names of the models that ship with the package, sorted."""
    return tuple(sorted(_presets(), key=str.casefold))


def load_model(name_or_path: str | os.PathLike[str] | Model) -> Model:
    """Return the model of a name or alias, or the model in a TOML file. A model is returned unchanged.

    Text that ends in ``.toml`` or contains a path separator is a path. Raises ``UsageError`` for an unknown
    name, and ``FormatError`` for a file that does not describe a model.
    """
    if isinstance(name_or_path, Model):
        return name_or_path
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text:
        path = Path(text)
        return model_of(read_rows(path, ModelFile, _ABOUT)[1], path)
    return named_model(text)


def named_model(text: str) -> Model:
    """Return the model with a name or alias. The text may come from an untrusted input and is never opened as
    a path.

    Raises ``UsageError`` for an unknown name.
    """
    owner = {_folded(alias): name for name, file in _presets().items() for alias in (name, *file.aliases)}
    preset = owner.get(_folded(text))
    if preset is None:
        close = get_close_matches(_folded(text), owner, n=4, cutoff=0.5)
        listed = ", ".join(dict.fromkeys(owner[alias] for alias in close))
        raise UsageError(
            f"no model '{clipped(text)}'",
            hint=f"{listed}{'? ' if listed else ''}run `hespas generate llm --list`, or give a .toml file",
        )
    return model_of(_presets()[preset])


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
"""Optional columns and their keys in a model file; latent attention (``mla``) needs its sizes."""


def model_in_table(table: Path, name: str) -> Model | None:
    """Return the model called ``name`` in a table of models; None if the table or the row does not exist.

    Raises ``UnsupportedError`` for an incomplete row, and ``FormatError`` for cells that are not numbers.
    """
    if not table.exists():
        return None
    rows = read_table(table, max_bytes=limits().report_bytes)
    row = next((row for row in rows if row.cells.get("model") == name), None)
    if row is None:
        return None
    position, cells = f"row {row.row}", row.cells
    attention = cells.get("attention", "")
    needed = (*_NEEDED, *_LATENT) if attention == "mla" else _NEEDED
    absent = [column for column in needed if not cells.get(column)]
    if absent or attention not in _ATTENTION:
        reason = f"{', '.join(absent)} missing" if absent else f"attention is {clipped(attention)}"
        raise UnsupportedError(
            f"the configuration of model {clipped(name)!r} is not known: {reason}",
            path=str(table),
            position=position,
            hint="describe it in a .toml file",
        )
    counts = {column: column for column in _NEEDED} | {
        column: key for column, key in _COUNTS.items() if cells.get(column)
    }
    sizes = {key: _count(cells, column, table, position) for column, key in counts.items()}
    limit, windows = _limits(cells, table, position)
    gated = cells.get("gated_mlp", "yes") != "no"
    settings = {
        "name": name,
        "source": cells.get("source", ""),
        "gated": gated,
        "activation": "silu" if gated else "gelu",
        "tied": cells.get("tied_embeddings") == "yes",
        "windows": windows,
    }
    return model_of(convert(settings | limit | sizes, ModelFile), table)


def _count(cells: Mapping[str, str], column: str, table: Path, position: str) -> int:
    text = cells[column]
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise FormatError(
            f"{clipped(text)!r} is not a whole number",
            path=str(table),
            position=f"{position}, column {column}",
            hint="write a whole number of 0 or more",
        )
    return int(text)


def _limits(cells: Mapping[str, str], table: Path, position: str) -> tuple[dict[str, int], str]:
    """Return the size limit of attention (window or chunk) and the pattern of the layers that have it. The
    table column has texts such as ``alternating``, ``5 local : 1 global`` or ``on 3 of 4 layers``.
    """
    if not cells.get("sliding_window"):
        return {}, ""
    pattern = cells.get("sliding_pattern", "")
    local, every = (
        re.search(r"\b(\d{1,3}) local", pattern),
        re.search(r"\b(\d{1,3}) of (\d{1,3}) layers", pattern),
    )
    count = _count(cells, "sliding_window", table, position)
    key = "chunk" if "chunk" in pattern else "window"
    if every:
        limited, period = int(every[1]), int(every[2])
    elif "alternating" in pattern or local:
        limited = int(local[1]) if local else 1
        period = limited + 1
    else:
        return {key: count}, ""
    if not 0 < limited < period <= 100:
        raise FormatError(
            f"{clipped(pattern)!r} is not a pattern of layers",
            path=str(table),
            position=f"{position}, column sliding_pattern",
            hint="write alternating, 5 local : 1 global, or on 3 of 4 layers",
        )
    return {key: count}, "L" * limited + "G" * (period - limited)
