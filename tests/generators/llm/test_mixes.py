"""Mixes of parallelism on 64 and 256 ranks: valid, and run by the embedded simulators without deadlock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

import hespas
from hespas.generators.llm.layout import Layout, broken_rules
from hespas.generators.llm.model import Attention, Experts, Mlp, Model
from hespas.generators.llm.settings import (
    SCHEDULES,
    STYLES,
    Overlap,
    Training,
    offload_of,
    recompute_of,
)
from hespas.generators.llm.step import training_workload
from hespas.graph import Severity

DENSE = Model(
    name="dense",
    hidden=1024,
    vocab=4096,
    layers=((Attention(heads=16, kv_heads=8, head_dim=64), Mlp(ffn=2048)),) * 8,
)
MIXTURE = Model(
    name="mixture",
    hidden=1024,
    vocab=4096,
    layers=(
        (Attention(heads=16, kv_heads=8, head_dim=64), Experts(experts=32, topk=4, ffn=512, shared_ffn=512)),
    )
    * 8,
)
NO_YES = (False, True)
HABITS: Mapping[str, tuple[Any, ...]] = {
    "schedule": SCHEDULES,
    "zero": (0, 1, 2, 3),
    "shard": (0, 2),
    "sequence_parallel": NO_YES,
    "context": ("gather", "ring", "all-to-all"),
    "etp": (1, 2),
    "expert_node": (0, 8),
    "style": STYLES,
    "recompute": ("none", "selective", "full", "full:1", "layernorm", "ffn", "ffn_act", "qkv"),
    "offload": ("", "optimizer", "layernorm,qkv", "ffn_act", "optimizer,block"),
    "lora_rank": (0, 8),
    **{f"overlap.{name}": NO_YES for name in Overlap.__slots__},
}
"""What frameworks do in one way or another, beside the degrees."""

DEGREES: Mapping[str, tuple[int, ...]] = {"tp": (1, 2, 8), "cp": (1, 2, 4), "pp": (1, 2, 4), "ep": (1, 4, 16)}
CHOICES: Mapping[str, tuple[Any, ...]] = {**HABITS, **DEGREES}
TRAITS = {
    trait: number
    for number, trait in enumerate((name, value) for name, values in CHOICES.items() for value in values)
}
"""Numbers of all that a step can be."""

Habits = Mapping[str, Any]
_DRAWS = 60


@dataclass(frozen=True)
class Mix:
    """A step to generate, and its ``traits``, which are to be combined in pairs with those of other steps."""

    model: Model
    layout: Layout
    training: Training
    traits: frozenset[tuple[str, Any]]

    @property
    def pairs(self) -> int:
        """The pairs of its traits, a bit each: thousands of mixes are compared by what is new in them."""
        traits = sum(1 << TRAITS[each] for each in self.traits)
        return sum(traits << (TRAITS[each] * len(TRAITS)) for each in self.traits)


def mix(degrees: Habits, habits: Habits) -> Mix:
    """The step of these degrees and habits, whether it can be or not."""
    model = MIXTURE if degrees["ep"] > 1 else DENSE
    schedule, part = habits["schedule"], "moe" if model is MIXTURE else "mlp"
    layout = Layout(
        **degrees,
        **{name: habits[name] for name in ("zero", "shard", "sequence_parallel", "etp", "expert_node")},
        vp=2 if schedule == "interleaved" else 1,
        ring_attention=habits["context"] == "ring",
        context_all_to_all=habits["context"] == "all-to-all",
    )
    offloads, recompute = offload_of(
        habits["offload"].replace("ffn", part), recompute_of(habits["recompute"].replace("ffn", part))
    )
    training = Training(
        seq=1024,
        global_batch=layout.dp * 2 * layout.pp,
        schedule=schedule,
        style=habits["style"],
        recompute=recompute,
        optimizer_offload=offloads,
        lora_rank=habits["lora_rank"],
        overlap=Overlap(**{name: habits[f"overlap.{name}"] for name in Overlap.__slots__}),
    )
    degreed = {(name, value) for name, value in degrees.items() if name != "dp"}
    return Mix(model, layout, training, frozenset(habits.items() | degreed))


def is_idle(degrees: Habits, habits: Habits) -> bool:
    """Return True if a setting has no effect at these degrees, so that another combination covers it."""
    return (
        (degrees["pp"] == 1 and (habits["schedule"] != "1f1b" or not habits["overlap.pipeline"]))
        or (degrees["cp"] == 1 and (habits["context"] != "gather" or not habits["overlap.context"]))
        or (degrees["tp"] == 1 and (not habits["sequence_parallel"] or habits["overlap.tensor"]))
    )


@cache
def mixes(ranks: int) -> tuple[Mix, ...]:
    """Mixes of habits at all degrees that multiply to ``ranks`` and break no rule."""
    return tuple(chosen(ranks))


def chosen(ranks: int) -> Iterator[Mix]:
    """For all degrees that multiply to ``ranks``, of some habits that break no rule there those which bring
    the most pairs that were not there before. Degrees that break a rule with all of them are left out.
    """
    chance = Random(ranks)
    seen = 0
    for tp, cp, pp, ep in product(*DEGREES.values()):
        if ranks % (tp * cp * pp):
            continue
        degrees = {"dp": ranks // (tp * cp * pp), "tp": tp, "cp": cp, "pp": pp, "ep": ep}
        found: list[Mix] = []
        for _ in range(100 * _DRAWS):
            habits = {name: values[int(chance.random() * len(values))] for name, values in HABITS.items()}
            if is_idle(degrees, habits):
                continue
            made = mix(degrees, habits)
            if not any(broken_rules(made.model, made.layout, made.training)):
                found.append(made)
            if len(found) == _DRAWS:
                break
        if found:
            best = max(found, key=lambda each: (each.pairs & ~seen).bit_count())
            seen |= best.pairs
            yield best


def test_the_mixes_are_many() -> None:
    assert [len(mixes(ranks)) for ranks in (64, 256)] == [78, 81]


IMPOSSIBLE = {
    frozenset(pair)
    for pair in (
        *((("pp", 1), ("schedule", each)) for each in ("gpipe", "interleaved", "zero-bubble")),
        *((("cp", 1), ("context", each)) for each in ("ring", "all-to-all")),
        *((("sequence_parallel", False), ("overlap.tensor", True)), (("zero", 0), ("shard", 2))),
        *((("sequence_parallel", False), ("ep", each)) for each in (4, 16)),  # routers see parts of sequences
        *((("sequence_parallel", False), each) for each in (("etp", 2), ("expert_node", 8))),
        (("sequence_parallel", False), ("overlap.experts", True)),
        *((("ep", 1), each) for each in (("etp", 2), ("expert_node", 8), ("overlap.experts", True))),
        (("etp", 2), ("expert_node", 8)),
        (("lora_rank", 8), ("overlap.tensor", True)),
        *((("tp", 1), each) for each in (("sequence_parallel", False), ("overlap.tensor", True))),
        *((("overlap.microbatches", True), each) for each in (("ep", 1), ("sequence_parallel", False))),
        *((("overlap.microbatches", True), ("schedule", each)) for each in ("gpipe", "zero-bubble")),
        (("pp", 1), ("overlap.pipeline", False)),
        (("cp", 1), ("overlap.context", False)),
    )
}
"""Pairs of traits that break a rule, or of which one says nothing beside the other."""


def test_traits_meet_in_pairs() -> None:
    every = {
        frozenset(((one, first), (other, second)))
        for one, other in combinations(CHOICES, 2)
        for first, second in product(CHOICES[one], CHOICES[other])
    }
    made = [each for ranks in (64, 256) for each in mixes(ranks)]
    met = {frozenset(pair) for each in made for pair in combinations(each.traits, 2)}
    assert every - met == IMPOSSIBLE


def runs(made: Mix) -> None:
    """Check that a step is valid, except for operations that ASTRA-sim does not support, and that it ends."""
    workload = training_workload(made.model, made.layout, made.training)
    report = hespas.check(workload, profile="astra-sim")
    errors = {each.code for each in report.details.violations if each.severity is Severity.ERROR}
    assert errors == ({"ET017"} if made.training.optimizer_offload else set()), made  # computed on the host
    assert hespas.check(workload, profile="chakra").valid, made
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0, made


@pytest.mark.parametrize("ranks", [64, 256])
def test_every_mix_is_valid_and_runs(ranks: int) -> None:
    for made in mixes(ranks):
        runs(made)


@pytest.mark.parametrize("place", [3, 31, 58])
def test_some_mixes_are_valid_and_run(place: int) -> None:
    runs(mixes(64)[place])
