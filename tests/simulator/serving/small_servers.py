"""Servers with round step times, whose runs can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.simulator.serving import SHARES, Policy, Requests, StepTimes


@dataclass(frozen=True)
class SmallGrids:
    tokens: tuple[int, ...] = (1, 101)
    rows: tuple[int, ...] = (1,)
    batch: tuple[int, ...] = (1, 101)
    context: tuple[int, ...] = (0, 100)
    prompts: tuple[int, ...] = (1,)
    length: tuple[int, ...] = (1,)
    before: tuple[int, ...] = (0,)


def even_steps() -> StepTimes:
    """A step takes 100 ns, 1 ns for each token, and 0.01 ns for each token of the cache that is read."""
    others = len(SHARES) - 1
    zero = np.zeros((others, 1))
    tokens = np.vstack([[[101.0, 201.0]], np.zeros((others, 2))])
    decode = np.zeros((len(SHARES), 2, 2))
    decode[SHARES.index("attention")] = [[0.0, 1.0], [0.0, 101.0]]
    return StepTimes(
        SmallGrids(),
        of_tokens=tokens,
        of_rows=np.vstack([[[0.0]], zero]),
        of_decode=decode,
        of_prompts=np.zeros((len(SHARES), 1, 1, 1)),
    )


def requests_of(*rows: tuple[float, int, int], concurrency: int = 0) -> Requests:
    columns = list(zip(*rows, strict=True))
    return Requests(
        arrival_ns=np.array(columns[0]),
        prompt=np.array(columns[1]),
        output=np.array(columns[2]),
        concurrency=concurrency,
    )


SMALL = Policy(tokens=64, sequences=4, page_tokens=4)
