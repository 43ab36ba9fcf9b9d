"""Transformers whose modules PyTorch runs one operator after another: sizes that their makers published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from hespas.generators.spec import Bounded
from hespas.graph.errors import UsageError

__all__ = ["EagerModel", "Written", "eager_model", "eager_models"]

Written = Literal["bert", "gpt2", "opt", "switch"]
"""Whose modules a model is written with (Hugging Face transformers, attention ``eager``): BERT
(arXiv 1810.04805), GPT-2, OPT (arXiv 2205.01068), Switch (arXiv 2101.03961, encoder and decoder of T5).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerModel(Bounded):
    """Sizes of a model. ``layers`` are those of the only stack, or of each (Switch: encoder and decoder).
    ``positions`` are those with an embedding of their own (Switch: none).
    ``experts`` share every second layer's tokens, each at most ``capacity`` of a sequence.
    """

    name: str
    written: Written
    hidden: int
    layers: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int = 0
    experts: int = 0
    capacity: int = 0
    source: str = ""

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def parameters(self) -> int:
        """All of them; heads of language models share the embedding's, and BERT has its pooler."""
        h, f = self.hidden, self.ffn
        if self.written == "switch":
            attention, dense = 3 * self.layers * (4 * h * self.inner + h), 2 * self.layers * h
            sparse = 2 * (self.layers // 2)
            layers = (2 * self.layers - sparse) * 2 * h * f + sparse * self.experts * (2 * h * f + h)
            return self.vocab * h + attention + dense + layers + 2 * h
        layer = 4 * h * (h + 1) + f * (h + 1) + h * (f + 1) + 4 * h
        embeddings = (self.vocab + self.positions) * h
        if self.written == "bert":
            return embeddings + 2 * h + 2 * h + self.layers * layer + h * (h + 1)
        return embeddings + self.layers * layer + 2 * h

    def forward_flops(self, batch: int, length: int, *, training: bool) -> float:
        """FLOPs of the products of forward, two for each weight and token and for each pair of tokens."""
        h, f, rows = self.hidden, self.ffn, batch * length
        attention = 2.0 * rows * 4 * h * self.inner + 4.0 * batch * length**2 * self.inner
        dense = 4.0 * rows * h * f
        if self.written == "switch":
            sparse = 2 * (self.layers // 2)
            most = min(rows, batch * self.capacity)
            routed = self.experts * (2.0 * rows * h + 4.0 * most * h * f)
            layers = 3 * self.layers * attention + (2 * self.layers - sparse) * dense + sparse * routed
        else:
            layers = self.layers * (attention + dense)
        if self.written == "bert":
            head = rows * h * (h + self.vocab) if training else batch * h * (h + 2)
            return layers + 2.0 * head
        return layers + 2.0 * rows * h * self.vocab

    def check(self) -> None:
        """Raise ``UsageError`` for sizes below 1."""
        if min(self.hidden, self.layers, self.heads, self.head_dim, self.ffn, self.vocab) < 1:
            raise UsageError(f"{self.name}: all sizes are at least 1")
        if self.written == "switch" and min(self.experts, self.capacity) < 1:
            raise UsageError(f"{self.name}: experts and their capacity are at least 1")


def _gpt(name: str, sizes: tuple[int, int, int, int], source: str) -> EagerModel:
    """Of hidden size, layers, heads and positions."""
    hidden, layers, heads, positions = sizes
    return EagerModel(
        name=name, written="gpt2", hidden=hidden, layers=layers, heads=heads, head_dim=hidden // heads,
        ffn=4 * hidden, vocab=50257, positions=positions, source=source,
    )  # fmt: skip


_NEUSIGHT = "github.com/sitar-lab/NeuSight, DLmodel_configs"
_MODELS = (
    EagerModel(
        name="bert-large", written="bert", hidden=1024, layers=24, heads=16, head_dim=64, ffn=4096,
        vocab=30522, positions=512, source="arXiv 1810.04805, table of models",
    ),
    _gpt("gpt2-large", (1280, 36, 20, 1024), "huggingface.co/openai-community/gpt2-large config.json"),
    _gpt("gpt3-xl", (3072, 24, 24, 2048), f"{_NEUSIGHT}/gpt3_xl.json (2,048 wide in arXiv 2005.14165)"),
    _gpt("gpt3-2.7b", (2560, 32, 32, 2048), "arXiv 2005.14165, table 2.1"),
    EagerModel(
        name="opt-1.3b", written="opt", hidden=2048, layers=24, heads=32, head_dim=64, ffn=8192,
        vocab=50272, positions=2050, source="huggingface.co/facebook/opt-1.3b config.json",
    ),
    EagerModel(
        name="switch-xl-4", written="switch", hidden=1024, layers=24, heads=32, head_dim=128, ffn=16384,
        vocab=32128, experts=4, capacity=64, source=f"{_NEUSIGHT}/switchxl4.json",
    ),
)  # fmt: skip
_BY_NAME: Mapping[str, EagerModel] = MappingProxyType({each.name: each for each in _MODELS})


def eager_models() -> tuple[EagerModel, ...]:
    """The models that ship."""
    return _MODELS


def eager_model(name: str) -> EagerModel:
    """A model by name. Raises ``UsageError`` for an unknown one."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UsageError(f"no model {name!r}", hint=f"one of: {', '.join(_BY_NAME)}")
    return found
