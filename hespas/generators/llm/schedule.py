"""In which order a pipeline stage works: forward, backward and weight-gradient passes of micro-batches.

GPipe (arXiv 1811.06965), 1F1B (1806.03377), interleaved 1F1B (2104.04473), zero bubble with the memory of
1F1B (2401.10241, ZB-H1). With F and B the times of a stage, its idle time is (p - 1)(F + B) for the first
two, that over the number of virtual stages for the third; the last splits B into the gradient of inputs,
which the stage before waits for, and that of weights, which fills gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.settings import ScheduleName

__all__ = ["Action", "Pass", "most_in_flight", "order_of"]

Pass = Literal["forward", "backward", "weights"]


class Action(NamedTuple):
    """One pass of one micro-batch through one chunk of a stage."""

    kind: Pass
    micro_batch: int
    chunk: int


def order_of(name: ScheduleName, layout: Layout, stage: int, micro_batches: int) -> list[Action]:
    """What a stage does, in order. One stage alone runs each micro-batch forward and backward. A schedule
    ``1f1b`` of several virtual stages is the interleaved one.
    """
    if layout.pp == 1:
        return [Action(kind, each, 0) for each in range(micro_batches) for kind in ("forward", "backward")]
    if name == "1f1b" and layout.vp > 1:
        name = "interleaved"
    return _ORDERS[name](layout, stage, micro_batches)


def _gpipe(_layout: Layout, _stage: int, micro_batches: int) -> list[Action]:
    forward = [Action("forward", each, 0) for each in range(micro_batches)]
    return forward + [Action("backward", each, 0) for each in range(micro_batches)]


def _one_forward_one_backward(layout: Layout, stage: int, micro_batches: int) -> list[Action]:
    forward = [Action("forward", each, 0) for each in range(micro_batches)]
    backward = [Action("backward", each, 0) for each in range(micro_batches)]
    return _alternating(forward, backward, min(layout.pp - 1 - stage, micro_batches))


def _interleaved(layout: Layout, stage: int, micro_batches: int) -> list[Action]:
    """Chunks in groups of as many micro-batches as there are stages, backward in reverse order of chunks."""
    stages, chunks = layout.pp, layout.vp
    forward: list[Action] = []
    backward: list[Action] = []
    for place in range(micro_batches * chunks):
        round_, within = divmod(place, stages * chunks)
        chunk, each = divmod(within, stages)
        forward.append(Action("forward", round_ * stages + each, chunk))
        backward.append(Action("backward", round_ * stages + each, chunks - 1 - chunk))
    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    return _alternating(forward, backward, min(ahead, len(forward)))


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """``ahead`` forward passes, then one of each in turn, then the backward passes that are left."""
    order = forward[:ahead]
    for place, each in enumerate(forward[ahead:]):
        order += [each, backward[place]]
    return order + backward[len(forward) - ahead :]


def _zero_bubble(layout: Layout, stage: int, micro_batches: int) -> list[Action]:
    return _zero_bubble_orders(layout.pp, micro_batches)[stage]


def _zero_bubble_orders(stages: int, micro_batches: int) -> list[list[Action]]:
    """All stages by a run in which every pass takes one unit: a stage takes forward passes as far ahead
    as 1F1B and while fewer than ``stages`` micro-batches are in flight, then backward passes, then weight
    gradients.
    """
    done_forward, done_backward = [0] * stages, [0] * stages
    done_weights = [0] * stages
    orders: list[list[Action]] = [[] for _ in range(stages)]
    while any(done < micro_batches for done in done_weights):
        before_forward, before_backward = list(done_forward), list(done_backward)
        for stage, order in enumerate(orders):
            forward, backward = before_forward[stage], before_backward[stage]
            arrived = before_forward[stage - 1] if stage else micro_batches
            returned = before_backward[stage + 1] if stage + 1 < stages else forward
            ahead = forward - backward < stages - stage and forward - done_weights[stage] < stages
            if forward < arrived and ahead:
                order.append(Action("forward", forward, 0))
                done_forward[stage] += 1
            elif backward < min(returned, forward):
                order.append(Action("backward", backward, 0))
                done_backward[stage] += 1
            elif done_weights[stage] < backward:
                order.append(Action("weights", done_weights[stage], 0))
                done_weights[stage] += 1
    return orders


_ORDERS: Mapping[ScheduleName, Callable[[Layout, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}


def most_in_flight(order: list[Action]) -> int:
    """The most passes of micro-batches through chunks whose values are kept for the backward pass at once."""
    ends = "weights" if any(each.kind == "weights" for each in order) else "backward"
    held = most = 0
    for each in order:
        held += (each.kind == "forward") - (each.kind == ends)
        most = max(most, held)
    return most
