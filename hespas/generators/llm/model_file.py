"""A model as a TOML file: the usual names of its sizes, which may be expressions over each other.

``hybrid`` gives the layers of a hybrid model a letter each: M Mamba, * attention, - feed-forward, E experts.
``windows`` gives the layers of a pattern a letter each, over and over: L limited by ``window`` (or
``chunk``), G global. The first ``dense_layers`` of a model with experts have a feed-forward block instead,
and of the others every ``moe_every``-th has experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from hespas.generators.llm.expressions import ExpressionError, evaluated
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
from hespas.graph.errors import UsageError, clipped
from hespas.hardware.typed_toml import FileKind, Row, Text, fault, read_rows

__all__ = ["PRESETS", "ModelFile", "load_model", "model_names", "model_of", "named_model"]

PRESETS = Path(__file__).parent / "presets.toml"
_ABOUT = FileKind(
    "a model file",
    where="check the path; `hespas generate llm --list` names the models that ship",
    example='name = "mine", hidden = 4096, layers = 32, heads = 32, ffn = "4 * hidden", vocab = 32000',
)
_Size = int | str
_Pattern = Annotated[str, Meta(max_length=4096, description="letters, one a layer")]


class ModelFile(Row, frozen=True, kw_only=True):
    """The keys of a model file; sizes are whole numbers or expressions."""

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


class _Presets(Row, frozen=True, kw_only=True):
    models: tuple[ModelFile, ...]


_MOST_LAYERS = 2_000
"""A step of so many takes 10 s to predict; published models have up to 128."""


def model_of(file: ModelFile, path: Path = PRESETS) -> Model:
    """The model that a file describes. Raises ``FormatError`` naming the key that is wrong."""
    stated = {name: getattr(file, name) for name in file.__struct_fields__}
    sizes = {
        name: value
        for name, value in stated.items()
        if (isinstance(value, int) and not isinstance(value, bool)) or name in _SIZES
    }
    try:
        size = evaluated(sizes)
    except ExpressionError as error:
        key, _, wrong = str(error).partition(": ")
        raise fault(path, key, wrong, _ABOUT.example) from error
    for key, value in size.items():
        if value > MOST_COUNT:
            raise fault(path, key, f"{value:,} is beyond {MOST_COUNT:,}", "a smaller size")
    for key, wrong, remedy in _faults(file, size):
        raise fault(path, key, wrong, remedy)
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
    """Keys that do not go together: the key, what is wrong, and what to write."""
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
        if size[name] > _MOST_LAYERS:
            yield name, f"{size[name]:,} are more than {_MOST_LAYERS:,} layers", "write fewer"
    if size["heads"] % size["kv_heads"]:
        yield (
            "kv_heads",
            f"{size['heads']} heads do not share {size['kv_heads']} key heads",
            "a number that divides heads",
        )
    if size["experts"] and size["topk"] > size["experts"]:
        yield "topk", f"a token uses {size['topk']} of {size['experts']} experts", "at most experts"
    if size["mamba_heads"] % (size["mamba_groups"] or 1):
        wrong = f"{size['mamba_heads']} heads do not part into {size['mamba_groups']} groups"
        yield "mamba_groups", wrong, "a number that divides mamba_heads"
    if file.windows and not size["window"] and not size["chunk"]:
        yield "windows", "layers are limited, and by what is not stated", "add window or chunk"


_SIZES = frozenset(name for name, kind in ModelFile.__annotations__.items() if kind == "_Size")
"""The keys whose values may be expressions."""


def _layers(file: ModelFile, size: Mapping[str, int], path: Path) -> Iterator[Layer]:
    made = _Blocks(file, size)
    if file.hybrid:
        letters = {"M": made.mamba, "E": made.experts, "-": made.mlp}
        if len(file.hybrid) != size["layers"]:
            wrong = f"{len(file.hybrid)} letters for {size['layers']} layers"
            raise fault(path, "hybrid", wrong, "write a letter for each layer")
        for letter in file.hybrid:
            if letter != "*" and letter not in letters:
                raise fault(path, "hybrid", f"{letter!r} is no kind of layer", "letters M, *, - and E")
            yield (made.attention(0) if letter == "*" else letters[letter](),)
        return
    if set(file.windows) - set("LG"):
        raise fault(
            path, "windows", f"{clipped(file.windows)} has other letters than L and G", 'windows = "LLLG"'
        )
    for place in range(size["layers"]):
        behind = place - size["dense_layers"]
        is_mixture = size["experts"] > 0 and behind >= 0 and (behind + 1) % size["moe_every"] == 0
        yield made.attention(place), made.experts() if is_mixture else made.mlp()


class _Blocks:
    """The blocks of a file."""

    def __init__(self, file: ModelFile, size: Mapping[str, int]) -> None:
        self.file, self.size = file, size

    def attention(self, place: int) -> Block:
        file, size = self.file, self.size
        if size["kv_lora"]:
            return LatentAttention(
                heads=size["heads"], q_lora=size["q_lora"], kv_lora=size["kv_lora"],
                nope_dim=size["nope_dim"], rope_dim=size["rope_dim"], v_dim=size["v_dim"],
            )  # fmt: skip
        limited = not file.windows or file.windows[place % len(file.windows)] == "L"
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
def _shipped() -> Mapping[str, ModelFile]:
    return {each.name: each for each in read_rows(PRESETS, _Presets, _ABOUT)[1].models}


def _folded(name: str) -> str:
    """A name without case and punctuation: ``llama-3.1-8b`` and ``Llama 3.1 8B`` are one."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def model_names() -> tuple[str, ...]:
    """The models that ship, sorted."""
    return tuple(sorted(_shipped(), key=str.casefold))


def load_model(name_or_path: str | os.PathLike[str]) -> Model:
    """The model of that name or alias, or the one in that TOML file.

    A path is what ends in ``.toml`` or holds a path separator. Raises ``UsageError`` for an unknown name,
    ``FormatError`` for a file that describes no model.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text:
        path = Path(text)
        return model_of(read_rows(path, ModelFile, _ABOUT)[1], path)
    return named_model(text)


def named_model(text: str) -> Model:
    """Return the model of that name or alias, which an input may state: it is never opened as a path.

    Raises ``UsageError`` for an unknown name.
    """
    owner = {_folded(alias): name for name, each in _shipped().items() for alias in (name, *each.aliases)}
    found = owner.get(_folded(text))
    if found is None:
        close = get_close_matches(_folded(text), owner, n=4, cutoff=0.5)
        listed = ", ".join(dict.fromkeys(owner[each] for each in close))
        raise UsageError(
            f"no model '{clipped(text)}'",
            hint=f"{listed}{'? ' if listed else ''}`hespas generate llm --list` names all; or a .toml file",
        )
    return model_of(_shipped()[found])
