"""The time of a step from the times of its passes, in the order in which stages run them.

Of one stage, passes are walked one after another until another micro-batch adds what the one before added.
Of several, each pass is walked alone, and the schedule run pass by pass: a pass begins when its stage is free
and what it works on has arrived. Reductions of gradients go on beside later passes of their stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.schedule import Action, order_of
from hespas.generators.llm.settings import ScheduleName
from hespas.graph.errors import InvariantError
from hespas.validators.league.parts import COMPONENTS, COMPUTE, DATA, PIPELINE, StageNodes
from hespas.validators.league.walk import Span, Walked, walked

__all__ = ["Schedule", "step_span"]

_WALKED = 3
"""Micro-batches of one stage that are walked; more add as much as the last of them."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of passes, and of each stage which of the distinct ones it is like. The sender of a message
    waits for it unless that ``overlaps``.
    """

    name: ScheduleName
    layout: Layout
    micro_batches: int
    like: Sequence[int]
    overlaps: bool


def step_span(stages: Sequence[StageNodes], schedule: Schedule, scale: Sequence[float]) -> Span:
    """The time of a step and what it is made of."""
    if schedule.layout.pp == 1:
        return _of_one(stages[0], schedule.micro_batches, scale)
    return _Pipeline(stages, schedule, scale).span()


def _of_one(stage: StageNodes, count: int, scale: Sequence[float]) -> Span:
    few = min(count, _WALKED)
    shorter = walked(stage, _sequence(stage, few), scale).everything
    if count == few:
        return shorter
    longer = walked(stage, _sequence(stage, few + 1), scale).everything
    return shorter + (longer - shorter).times(count - few)


def _sequence(stage: StageNodes, count: int) -> list[int]:
    found: list[int] = []
    for each in range(count):
        found.append(stage.part("forward", 0, special=each == 0))
        found.append(stage.part("backward", 0, special=each == count - 1))
    return [*found, stage.end]


_Key = tuple[int, str, int, bool]
"""A pass: which stage it is like, its kind, its chunk, whether it is the special one."""
_WAITED: _Key = (-1, "", -1, False)
"""In place of a pass that ended when its weights had come."""


class _Chain(NamedTuple):
    """Until when a stage gathers weights or reduces gradients: so long after the end of an event (-1: after
    the step began).
    """

    end_ns: float
    event: int
    after: Span


class _Pipeline:
    """A schedule of passes under way. Events are passes that ran; each has the one that it waited for."""

    def __init__(self, stages: Sequence[StageNodes], schedule: Schedule, scale: Sequence[float]) -> None:
        self.stages, self.schedule, self.scale = stages, schedule, scale
        self.passes: dict[_Key, Walked] = {}
        self.end: list[float] = []
        self.key: list[_Key] = []
        self.place: list[_Key] = []
        """The pass of each event, ``key`` but for those that ended when their weights had come."""
        self.before: list[tuple[int, Span | None]] = []
        """The event that was waited for, and the message between."""
        self.done: dict[tuple[str, int, int], int] = {}
        """The event of a kind, micro-batch and chunk of all."""
        self.latest = [-1] * schedule.layout.pp
        self.reduced: list[_Chain | None] = [None] * schedule.layout.pp
        self.gathered: list[_Chain | None] = [None] * schedule.layout.pp

    def span(self) -> Span:
        """All stages in turn, each as far as it gets, until all are through."""
        schedule = self.schedule
        pp, count = schedule.layout.pp, schedule.micro_batches
        orders = [order_of(schedule.name, schedule.layout, stage, count) for stage in range(pp)]
        at = [0] * pp
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(orders):
                while at[stage] < len(order) and self._run(stage, order[at[stage]]):
                    at[stage] += 1
                    moved = True
        if any(place < len(order) for place, order in zip(at, orders, strict=True)):
            raise InvariantError(f"the schedule {schedule.name} comes to a stop")
        return self._finish()

    def _run(self, stage: int, action: Action) -> bool:
        """Run a pass if what it needs has been made."""
        schedule, (kind, micro_batch, chunk) = self.schedule, action
        place = chunk * schedule.layout.pp + stage
        event, message, start = self.latest[stage], None, 0.0
        if event >= 0:
            start = self.end[event]
            if not schedule.overlaps:
                message = self._message(event)
                start += message.time_ns
        need = self._need(kind, micro_batch, place)
        if need is not None:
            other = self.done.get(need)
            if other is None:
                return False
            between = self._message(other)
            if self.end[other] + between.time_ns > start:
                start, event, message = self.end[other] + between.time_ns, other, between
        last = schedule.micro_batches - 1
        special = micro_batch == (0 if kind == "forward" else last)
        key = (schedule.like[stage], kind, chunk, special)
        gathers = special and kind == "forward" and self._gathers(key)
        found = self._pass((*key[:3], False) if gathers else key)
        end, before = start + found.computed.time_ns, (event, message)
        if gathers:
            chain = self._gather(stage, key, start, event)
            if chain.end_ns > end:
                end, before, key = chain.end_ns, (chain.event, chain.after), _WAITED
        self.done[kind, micro_batch, place] = len(self.end)
        self.latest[stage] = len(self.end)
        self.end.append(end)
        self.key.append((*key[:3], False) if gathers and key != _WAITED else key)
        self.place.append((schedule.like[stage], kind, chunk, special))
        self.before.append(before)
        if special and kind != "forward":
            self._reduce(stage, found)
        return True

    def _gathers(self, key: _Key) -> bool:
        """Whether a pass gathers weights that stay for the step, so that it differs from those after it."""
        return (key[1], key[2], False) in self.stages[key[0]].variants

    def _gather(self, stage: int, key: _Key, start: float, event: int) -> _Chain:
        """Weights of one chunk are gathered after those of the one before, beside what runs: from the first
        pass of the stage on. A pass ends at the earliest with its last layer, whose weights come last.
        """
        nodes = self.stages[key[0]]
        part = nodes.parts[nodes.part(key[1], key[2], special=True)]
        own = np.zeros(len(COMPONENTS))
        own[DATA] = sum(
            nodes.time_ns[node]
            for node in range(part.start, part.end)
            if nodes.component[node] == DATA and nodes.stream[node] != COMPUTE
        )
        gathering = Span(float(own[DATA]) * self.scale[DATA], own)
        before = self.gathered[stage]
        if before is None:
            chain = _Chain(start + gathering.time_ns, event, gathering)
        else:
            chain = _Chain(before.end_ns + gathering.time_ns, before.event, before.after + gathering)
        self.gathered[stage] = chain
        return chain

    def _need(self, kind: str, micro_batch: int, place: int) -> tuple[str, int, int] | None:
        """The pass of another stage that a pass waits for."""
        chunks = self.schedule.layout.pp * self.schedule.layout.vp
        if kind == "forward" and place:
            return kind, micro_batch, place - 1
        if kind == "backward" and place + 1 < chunks:
            return kind, micro_batch, place + 1
        return None

    def _pass(self, key: _Key) -> Walked:
        found = self.passes.get(key)
        if found is None:
            like, kind, chunk, special = key
            stage = self.stages[like]
            found = walked(stage, [stage.part(kind, chunk, special=special)], self.scale)
            self.passes[key] = found
        return found

    def _message(self, event: int) -> Span:
        """What a pass sends on to the next stage."""
        like, kind, chunk, special = self.place[event]
        stage = self.stages[like]
        part = stage.parts[stage.part(kind, chunk, special=special)]
        time_ns = sum(
            stage.time_ns[node] for node in range(part.start, part.end) if stage.component[node] == PIPELINE
        )
        parts = np.zeros(len(COMPONENTS))
        parts[PIPELINE] = time_ns
        return Span(time_ns * self.scale[PIPELINE], parts)

    def _reduce(self, stage: int, found: Walked) -> None:
        """What is left of the reductions of a pass follows those of passes before it."""
        event, rest = len(self.end) - 1, found.everything - found.computed
        before = self.reduced[stage]
        if before is not None and before.end_ns > self.end[event]:
            self.reduced[stage] = _Chain(before.end_ns + rest.time_ns, before.event, before.after + rest)
        else:
            self.reduced[stage] = _Chain(self.end[event] + rest.time_ns, event, rest)

    def _finish(self) -> Span:
        """The last stage to be through, then the update, for which all wait for each other."""
        ends = [_Chain(self.end[event], event, Span.nothing()) for event in self.latest]
        ends += [each for each in self.reduced if each is not None]
        slowest = max(ends, key=lambda each: each.end_ns)
        update = max(
            (walked(stage, [stage.end], self.scale).everything for stage in self.stages),
            key=lambda each: each.time_ns,
        )
        return self._traced(slowest.event) + slowest.after + update

    def _traced(self, event: int) -> Span:
        """Until the end of an event, by the chain of those that were waited for."""
        time_ns, parts = self.end[event], np.zeros(len(COMPONENTS))
        while event >= 0:
            if self.key[event] != _WAITED:
                parts += self.passes[self.key[event]].computed.parts
            event, message = self.before[event]
            if message is not None:
                parts += message.parts
        return Span(time_ns, parts)
