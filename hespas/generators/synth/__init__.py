"""Synthesis of graphs and jobs that keep the statistics of training graphs and copy none of them."""

from __future__ import annotations

from hespas.generators.synth.card import SynthesisCard, measure_synthesis
from hespas.generators.synth.ngram import FrontierNgram
from hespas.generators.synth.sequences import Token, TypedDag, flatten, structure_key, unflatten
from hespas.generators.synth.synthesis import DraftModel, Synthesizer
from hespas.generators.synth.transformer import Transformer

__all__ = [
    "DraftModel",
    "FrontierNgram",
    "SynthesisCard",
    "Synthesizer",
    "Token",
    "Transformer",
    "TypedDag",
    "flatten",
    "measure_synthesis",
    "structure_key",
    "unflatten",
]
