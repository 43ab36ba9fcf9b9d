"""Mixes of parallelism on 64 and 256 ranks: valid, and run by the embedded simulators without deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

import hespas
from hespas.generators.llm.layout import Layout, broken_rules
from hespas.generators.llm.model import Attention, Experts, Mlp, Model
from hespas.generators.llm.settings import ScheduleName, Training
from hespas.generators.llm.step import training_workload

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
    layers=((Attention(heads=16, kv_heads=8, head_dim=64), Experts(experts=32, topk=4, ffn=512)),) * 8,
)
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def training(layout: Layout, schedule: ScheduleName) -> Training:
    return Training(seq=1024, global_batch=layout.dp * 2 * layout.pp, schedule=schedule)


def mixes(ranks: int) -> Iterator[tuple[Model, Layout, ScheduleName]]:
    """Degrees that multiply to ``ranks`` and break no rule; schedules and sharding take turns over them."""
    turn = 0
    for tp, cp, pp, ep in product((1, 2, 8), (1, 2, 4), (1, 2, 4), (1, 4, 16)):
        if ranks % (tp * cp * pp):
            continue
        turn += 1
        schedule = SCHEDULES[turn % 4] if pp > 1 else "1f1b"
        layout = Layout(
            dp=ranks // (tp * cp * pp),
            tp=tp,
            cp=cp,
            pp=pp,
            ep=ep,
            vp=2 if schedule == "interleaved" else 1,
            zero=turn % 4,
            ring_attention=turn % 3 == 0,
        )
        model = MIXTURE if ep > 1 else DENSE
        if not list(broken_rules(model, layout, training(layout, schedule))):
            yield model, layout, schedule


def test_the_mixes_are_many() -> None:
    assert [len(list(mixes(ranks))) for ranks in (64, 256)] == [78, 81]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [64, 256])
def test_every_mix_is_valid_and_runs(ranks: int) -> None:
    for model, layout, schedule in mixes(ranks):
        workload = training_workload(model, layout, training(layout, schedule))
        report = hespas.check(workload, profile="astra-sim")
        assert report.valid, (layout, schedule)
        done = hespas.simulate(workload, "H100-SXM", system="dgx-h100")
        assert done.step_ns > 0, (layout, schedule)


@pytest.mark.parametrize("place", [3, 17, 31, 44, 58])
def test_some_mixes_are_valid_and_run(place: int) -> None:
    model, layout, schedule = list(mixes(64))[place]
    workload = training_workload(model, layout, training(layout, schedule))
    assert hespas.check(workload, profile="astra-sim").valid
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0
