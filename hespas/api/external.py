"""Several answers side by side: the embedded simulator, a user's ASTRA-sim, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from hespas.files.documents import Count, Figure
from hespas.graph import Profile
from hespas.graph.columns import IntArray
from hespas.simulator.astra import RankStatistics
from hespas.simulator.astra.external import ExternalRun

__all__ = ["ExternalDocument", "ExternalRank", "external_document", "measured_step_ns"]


class ExternalRank(msgspec.Struct, frozen=True):
    """A rank as a user's ASTRA-sim prints it."""

    rank: int
    finish_ns: Figure
    exposed_comm_ns: Figure
    compute_ns: Figure
    comm_ns: Figure
    wall_ns: Figure
    cpu_ns: Figure
    remote_memory_ns: Figure
    overlap_ns: Figure


class ExternalDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a user's ASTRA-sim: ``differing_ranks`` finish at another time, or expose another time of
    communication, than in the embedded simulator.
    """

    simulator: Literal["astra-sim"] = "astra-sim"
    binary: str
    exit_code: int
    step_ns: Figure
    differing_ranks: Count
    ranks: list[ExternalRank]


def external_document(run: ExternalRun, embedded: RankStatistics) -> ExternalDocument:
    """The run beside the same job in the embedded simulator."""
    said = run.statistics
    differs = (said.finish_ns != embedded.finish_ns) | (said.exposed_comm_ns != embedded.exposed_comm_ns)
    columns = (
        said.finish_ns, said.exposed_comm_ns, said.compute_ns, said.comm_ns, said.wall_ns, said.cpu_ns,
        said.remote_memory_ns, said.overlap_ns,
    )  # fmt: skip
    rows = zip(*(_known(column).tolist() for column in columns), strict=True)
    return ExternalDocument(
        binary=run.binary,
        exit_code=run.exit_code,
        step_ns=float(said.finish_ns.max()),
        differing_ranks=int(differs.sum()),
        ranks=[ExternalRank(rank, *row) for rank, row in enumerate(rows)],
    )


def _known(column: IntArray) -> IntArray | np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.where(column < 0, np.nan, column)


def measured_step_ns(profiles: Sequence[Profile]) -> float:
    """The longest time from the first to the last event of a profile's device; NaN without profiles."""
    spans = [
        float(np.nanmax(profile.start_ns + profile.duration_ns) - np.nanmin(profile.start_ns))
        for profile in profiles
        if len(profile.start_ns)
    ]
    return max(spans, default=float("nan"))
