"""Stages of few nodes, to walk by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hespas.generators.llm.assemble import Part
from hespas.validators.league.parts import COMPONENTS, StageNodes

PRODUCTS, DATA, HOST, OVERLAP, PIPELINE, BUBBLE = (
    COMPONENTS.index(name) for name in ("products", "data", "host", "overlap", "pipeline", "bubble")
)


def scale(*, host_ns: float = 0.0, overlap: float = 0.0, products: float = 1.0) -> list[float]:
    """Factors of the components."""
    found = [1.0] * len(COMPONENTS)
    found[HOST], found[OVERLAP], found[PRODUCTS] = host_ns, overlap, products
    return found


Node = tuple[float, int, int, tuple[int, ...]]
"""Time, component, stream, and what it waits for."""


def stage(
    nodes: Sequence[Node],
    parts: Sequence[Part],
    variants: dict[tuple[str, int, bool], int],
    waited: Sequence[int] = (),
) -> StageNodes:
    """A stage whose last part ends the step; the host waits for the nodes ``waited``."""
    return StageNodes(
        [each[0] for each in nodes],
        [each[1] for each in nodes],
        [each[2] for each in nodes],
        [list(each[3]) for each in nodes],
        [number in waited for number in range(len(nodes))],
        parts,
        variants,
        len(parts) - 1,
    )


def plain_stage(
    forward_ns: float, backward_ns: float, message_ns: float = 0.0, chunks: int = 1
) -> StageNodes:
    """Passes of one kernel and one message each, and an update of no time."""
    nodes: list[Node] = []
    parts: list[Part] = []
    variants: dict[tuple[str, int, bool], int] = {}
    for chunk in range(chunks):
        for kind, time_ns in (("forward", forward_ns), ("backward", backward_ns)):
            start = len(nodes)
            nodes += [(time_ns, PRODUCTS, 0, ()), (message_ns, PIPELINE, 9, (start,))]
            variants[kind, chunk, True] = len(parts)
            parts.append(Part(kind, chunk, start, start + 2))
    parts.append(Part("end", 0, len(nodes), len(nodes)))
    return stage(nodes, parts, variants)
