"""Cases of the agreement tests: programs among the fixtures, and layouts of small language models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Model
from hespas.generators.llm.settings import Overlap, ScheduleName, Style, Training, recompute_of
from hespas.generators.llm.step import LlmStep
from tests.generators.llm.small_models import DENSE, HYBRID, MIXTURE, PLAIN, training

__all__ = ["DEVICE", "FIXTURES", "LAYOUTS", "PROGRAMS", "RECORDINGS", "DrawnStep"]

DEVICE = "H100-SXM"
FIXTURES = Path(__file__).parents[2] / "fixtures"


def _listed(*patterns: str) -> list[str]:
    found = (path for pattern in patterns for path in FIXTURES.glob(pattern))
    return sorted(str(path.relative_to(FIXTURES)) for path in found)


PROGRAMS = _listed("stablehlo/*.mlir*", "hlo/*.hlo.txt*", "binary/*", "op_graph/*.json*", "rescale/*.gz")
"""Programs, in every format and form that is read."""

RECORDINGS = _listed("profiles/*", "recorded/*.pb.gz", "graph_replay/*_*", "rescale/gloo*")
"""Profiles and traces with measured times."""


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A training step of a small model with a drawn layout."""

    number: int
    step: LlmStep

    def __str__(self) -> str:
        """Return the model and the degrees of parallelism as the name of a test case."""
        layout = self.step.layout
        degrees = "-".join(
            f"{name}{getattr(layout, name)}"
            for name in ("dp", "tp", "pp", "vp", "cp", "ep", "zero")
            if getattr(layout, name) > 1
        )
        return f"{self.number}-{self.step.model.name}-{degrees}"


_MODELS = (DENSE, PLAIN, MIXTURE, HYBRID)
_STYLES: tuple[Style, ...] = ("megatron", "torchtitan", "maxtext")
_SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zero-bubble")
_DRAWN = 50


def _drawn_layout(draw: random.Random, model: Model) -> Layout:
    pp = draw.choice([1, 1, 2, 4])
    experts = model is MIXTURE
    tp = draw.choice([1, 2, 4])
    dp = draw.choice([1, 2, 4])
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        vp=2 if pp == 2 and model is DENSE and draw.random() < 0.3 else 1,
        cp=draw.choice([1, 1, 2]) if model in {DENSE, PLAIN} else 1,
        ep=dp if experts else 1,
        zero=draw.choice([0, 1, 2, 3]),
        sequence_parallel=experts or draw.random() < 0.7,
    )


def _drawn_training(draw: random.Random, layout: Layout) -> Training:
    schedule: ScheduleName = "interleaved" if layout.vp > 1 else draw.choice(_SCHEDULES)
    micro_batches = layout.pp * draw.choice([1, 2, 3, 5])
    return training(
        global_batch=layout.dp * micro_batches,
        schedule=schedule,
        style=draw.choice(_STYLES),
        overlap=draw.choice([Overlap(), Overlap.none()]),
        recompute=recompute_of(draw.choice(["none", "selective", "full"])),
    )


def _drawn() -> Iterator[DrawnStep]:
    """Draw steps whose settings the generator accepts, the same ones in every run."""
    from hespas.graph.errors import UsageError

    draw = random.Random(35)
    count = 0
    while count < _DRAWN:
        model = draw.choice(_MODELS)
        layout = _drawn_layout(draw, model)
        step = LlmStep(model=model, layout=layout, training=_drawn_training(draw, layout))
        try:
            step.account()
        except UsageError:
            continue
        yield DrawnStep(count, step)
        count += 1


LAYOUTS = tuple(_drawn())
"""Fifty drawn steps of models with and without experts, latent attention and state-space layers."""
