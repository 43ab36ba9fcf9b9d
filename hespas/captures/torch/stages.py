"""What stages of a pipeline tell each other before their first step: shapes, which nobody sends here.

Each rank is run on its own, so that a rank which asks for what another has not told yet stops with
:class:`NotYet`, and is run again after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from hespas.captures.torch.library import torch_module
from hespas.captures.torch.swap import swapped
from hespas.graph.errors import UnsupportedError

__all__ = ["NotYet", "StageBoard"]

_Result = TypeVar("_Result")


class NotYet(BaseException):
    """The rank ``peer`` has to run first. No error: the user's handlers of exceptions must not see it."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


class StageBoard:
    """What stages have told: by the rank and number of the stage that tells, and those of the one told."""

    def __init__(self) -> None:
        self.told: dict[tuple[int, int, int, int], object] = {}
        self._anyone: dict[tuple[int, int], object] = {}
        """What the first rank of a stage told that of another: taken for what others of them would tell."""

    @contextmanager
    def on(self, rank: int) -> Generator[None]:
        """Let the stages of a rank tell and ask here. All of them find shapes by running, since the vote on
        that is among ranks.
        """
        stage = torch_module("torch.distributed.pipelining.stage").PipelineStage
        schedule = torch_module("torch.distributed.pipelining.schedules")._PipelineSchedule
        dynamic = torch_module("torch.distributed.pipelining.stage").InferenceMode.DYNAMIC

        def tell(self: Any, meta: object, to_stage: int) -> None:
            told[rank, self.stage_index, self._resolve_peer_global_rank(to_stage), to_stage] = meta
            anyone.setdefault((self.stage_index, to_stage), meta)

        def ask(self: Any, from_stage: int) -> object:
            peer = self._resolve_peer_global_rank(from_stage)
            key = (peer, from_stage, rank, self.stage_index)
            pair = (from_stage, self.stage_index)
            if key not in told and pair not in anyone:
                raise NotYet(peer)
            return told[key] if key in told else anyone[pair]

        def agree(_: object, stages: list[Any], *__: object) -> None:
            for each in stages:
                each._inference_mode = dynamic

        told, anyone = self.told, self._anyone
        with ExitStack() as stack:
            stack.enter_context(swapped(stage, "_send_meta", tell))
            stack.enter_context(swapped(stage, "_recv_meta", ask))
            stack.enter_context(swapped(schedule, "_warmup_p2p", agree))
            yield

    def in_turn(self, rank: int, run: Callable[[int], _Result]) -> dict[int, _Result]:
        """Run a rank, and before it those that it asks. Returns the results of all that came to an end.

        Raises ``UnsupportedError`` where ranks wait for each other.
        """
        results: dict[int, _Result] = {}
        waiting = [rank]
        stuck: dict[tuple[int, int], int] = {}
        while waiting:
            now = waiting[-1]
            if now in results:
                waiting.pop()
                continue
            try:
                results[now] = run(now)
            except NotYet as gap:
                if stuck.get((now, gap.peer)) == len(self.told):
                    raise UnsupportedError(
                        f"stages of ranks {now} and {gap.peer} wait for each other's shapes",
                        hint="give PipelineStage its input_args and output_args",
                    ) from gap
                stuck[now, gap.peer] = len(self.told)
                waiting.append(gap.peer)
        return results
