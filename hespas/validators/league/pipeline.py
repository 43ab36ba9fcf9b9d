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
from hespas.graph.columns import FloatArray
from hespas.graph.errors import InvariantError
from hespas.validators.league.parts import (
    BUBBLE,
    COMPONENTS,
    COMPUTE,
    DATA,
    HOST,
    PIPELINE,
    StageNodes,
)
from hespas.validators.league.walk import Span, Walked, walked

__all__ = ["Schedule", "Step", "step_span"]

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


@dataclass(frozen=True, slots=True, eq=False)
class Step(Span):
    """A step by its critical path, which crosses stages, and by the stage that is the last to finish:
    ``spent_ns`` by component, shape ``(components,)``, with what that stage waits for others as its bubble.
    Both sum to the time, the first by the scale of components.
    """

    spent_ns: FloatArray


def step_span(stages: Sequence[StageNodes], schedule: Schedule, scale: Sequence[float]) -> Step:
    """Return the time of a step and its parts, none of them below zero."""
    if schedule.layout.pp == 1:
        path = _of_one(stages[0], schedule.micro_batches, scale).settled(scale)
        return Step(path.time_ns, path.parts, path.parts * np.asarray(scale))
    return _Pipeline(stages, schedule, scale).step()


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


class _Key(NamedTuple):
    """A pass: which stage it is like, its kind, its chunk, whether it is the special one."""

    like: int
    kind: str
    chunk: int
    special: bool


class _Event(NamedTuple):
    """A pass that ran: when it ended, the event that it waited for (-1: none), what passed since that ended,
    and what it sends on.
    """

    end_ns: float
    before: int
    since: FloatArray
    message: Span


class _Chain(NamedTuple):
    """Until when a stage gathers weights or reduces gradients: so long after the end of an event (-1: after
    the step began).
    """

    end_ns: float
    event: int
    after: Span


class _Pipeline:
    """A schedule of passes under way."""

    def __init__(self, stages: Sequence[StageNodes], schedule: Schedule, scale: Sequence[float]) -> None:
        self.stages, self.schedule, self.scale = stages, schedule, scale
        self.passes: dict[tuple[_Key, bool], Walked] = {}
        self.messages: dict[_Key, Span] = {}
        self.events: list[_Event] = []
        self.done: dict[tuple[str, int, int], int] = {}
        """The event of a kind, micro-batch and chunk of all."""
        self.latest = [-1] * schedule.layout.pp
        self.reduced: list[_Chain | None] = [None] * schedule.layout.pp
        self.gathered: list[_Chain | None] = [None] * schedule.layout.pp
        self.spent = [Span.nothing()] * schedule.layout.pp
        """The time of a stage that is not idle."""

    def step(self) -> Step:
        """Run all stages in turn, each as far as it gets, until all have finished."""
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
        need = self._need(kind, micro_batch, place)
        if need is not None and need not in self.done:
            return False
        start, before, waited = self._start(stage, None if need is None else self.done[need])
        special = micro_batch == (0 if kind == "forward" else schedule.micro_batches - 1)
        key = _Key(schedule.like[stage], kind, chunk, special)
        gathers = special and kind == "forward" and self._gathers(key)
        found = self._pass(key._replace(special=False) if gathers else key, first=self.latest[stage] < 0)
        event = _Event(
            start + found.computed.time_ns, before, waited + found.computed.parts, self._message(key)
        )
        self.spent[stage] += found.computed
        if gathers:
            chain = self._gather(stage, key, start, before)
            if chain.end_ns > event.end_ns:
                self.spent[stage] += self._of_data(chain.end_ns - event.end_ns)
                event = _Event(chain.end_ns, chain.event, chain.after.parts, event.message)
        self.done[kind, micro_batch, place] = self.latest[stage] = len(self.events)
        self.events.append(event)
        if special and kind != "forward":
            self._reduce(stage, found)
        return True

    def _start(self, stage: int, needed: int | None) -> tuple[float, int, FloatArray]:
        """When a pass can begin, the event that it waits for, and what passes between."""
        nothing, latest = np.zeros(len(COMPONENTS)), self.latest[stage]
        start, before, waited = 0.0, latest, nothing
        if latest >= 0:
            own = self.events[latest]
            start = own.end_ns
            if not self.schedule.overlaps:
                start, waited = start + own.message.time_ns, own.message.parts
                self.spent[stage] += own.message
        if needed is not None:
            other = self.events[needed]
            arrival = other.end_ns + other.message.time_ns
            if arrival > start:
                start, before, waited = arrival, needed, other.message.parts
        return start, before, waited

    def _gathers(self, key: _Key) -> bool:
        """Whether a pass gathers weights that stay for the step, so that it differs from those after it."""
        return (key.kind, key.chunk, False) in self.stages[key.like].variants

    def _gather(self, stage: int, key: _Key, start: float, event: int) -> _Chain:
        """Weights of one chunk are gathered after those of the one before, beside what runs, from the first
        pass of the stage on; no pass ends before its weights have come.
        """
        gathering = self._sum_of(key, DATA)
        before = self.gathered[stage]
        if before is None:
            since = 0.0 if event < 0 else self.events[event].end_ns
            waited = Span(start - since, self._waited(start, event))
            chain = _Chain(start + gathering.time_ns, event, waited + gathering)
        else:
            chain = _Chain(before.end_ns + gathering.time_ns, before.event, before.after + gathering)
        self.gathered[stage] = chain
        return chain

    def _waited(self, start: float, event: int) -> FloatArray:
        """What passes between the end of an event and a start after it: its message."""
        if event >= 0 and start > self.events[event].end_ns:
            return self.events[event].message.parts
        return np.zeros(len(COMPONENTS))

    def _sum_of(self, key: _Key, component: int) -> Span:
        """The communication of one component in a pass."""
        nodes = self.stages[key.like]
        part = nodes.parts[nodes.part(key.kind, key.chunk, special=key.special)]
        parts = np.zeros(len(COMPONENTS))
        parts[component] = sum(
            nodes.time_ns[node]
            for node in range(part.start, part.end)
            if nodes.component[node] == component and nodes.stream[node] != COMPUTE
        )
        return Span(float(parts[component]) * self.scale[component], parts)

    def _need(self, kind: str, micro_batch: int, place: int) -> tuple[str, int, int] | None:
        """The pass of another stage that a pass waits for."""
        chunks = self.schedule.layout.pp * self.schedule.layout.vp
        if kind == "forward" and place:
            return kind, micro_batch, place - 1
        if kind == "backward" and place + 1 < chunks:
            return kind, micro_batch, place + 1
        return None

    def _pass(self, key: _Key, *, first: bool) -> Walked:
        """Return a pass alone. Behind the first of a stage the host is ahead, unless its launches take longer
        than the pass.
        """
        found = self.passes.get((key, first))
        if found is None:
            stage = self.stages[key.like]
            part = stage.part(key.kind, key.chunk, special=key.special)
            found = walked(stage, [part], self.scale)
            nodes = stage.parts[part].end - stage.parts[part].start
            if not first and nodes * self.scale[HOST] < found.computed.time_ns and not any(stage.waited):
                found = walked(stage, [part], [*self.scale[:HOST], 0.0, *self.scale[HOST + 1 :]])
            self.passes[key, first] = found
        return found

    def _message(self, key: _Key) -> Span:
        """What a pass sends on to the next stage."""
        found = self.messages.get(key)
        if found is None:
            found = self.messages[key] = self._sum_of(key, PIPELINE)
        return found

    def _reduce(self, stage: int, found: Walked) -> None:
        """What is left of the reductions of a pass follows those of passes before it."""
        event, rest = self.latest[stage], found.everything - found.computed
        before, end = self.reduced[stage], self.events[event].end_ns
        if before is not None and before.end_ns > end:
            self.reduced[stage] = _Chain(before.end_ns + rest.time_ns, before.event, before.after + rest)
        else:
            self.reduced[stage] = _Chain(end + rest.time_ns, event, rest)

    def _of_data(self, time_ns: float) -> Span:
        """Return a time that a stage waits for its weights or gradients."""
        parts = np.zeros(len(COMPONENTS))
        parts[DATA] = time_ns / self.scale[DATA]
        return Span(time_ns, parts)

    def _finish(self) -> Step:
        """Return the step: the last stage to finish, then the update, for which all wait for each other."""
        ends = [
            (_Chain(self.events[event].end_ns, event, Span.nothing()), stage)
            for stage, event in enumerate(self.latest)
        ]
        ends += [(chain, stage) for stage, chain in enumerate(self.reduced) if chain is not None]
        slowest, last = max(ends, key=lambda end: end[0].end_ns)
        update = max(
            (walked(stage, [stage.end], self.scale).everything for stage in self.stages),
            key=lambda span: span.time_ns,
        )
        path = (self._traced(slowest.event) + slowest.after + update).settled(self.scale)
        reduced = self._of_data(slowest.end_ns - self.events[self.latest[last]].end_ns)
        spent = self.spent[last] + reduced + update
        spent_ns = spent.parts * np.asarray(self.scale)
        spent_ns[BUBBLE] = max(path.time_ns - spent.time_ns, 0.0)
        return Step(path.time_ns, path.parts, spent_ns)

    def _traced(self, event: int) -> Span:
        """Until the end of an event, by the chain of those that were waited for."""
        time_ns, parts = self.events[event].end_ns, np.zeros(len(COMPONENTS))
        while event >= 0:
            parts += self.events[event].since
            event = self.events[event].before
        return Span(time_ns, parts)
