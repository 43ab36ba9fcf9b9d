"""The version label that a trace is written with, where the user names one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.converters.chakra.contract import Tag
from hespas.graph import ExtraTable, OpGraph, Workload
from hespas.graph.errors import UsageError
from hespas.schemas.chakra.history import LATEST_VERSIONS

__all__ = ["with_label"]


def with_label(workload: Workload, version: str) -> Workload:
    """The workload whose traces say ``version``; as it is for an empty one.

    Raises :class:`UsageError` for a version that is not written: both that are have the same bytes but for
    the label.
    """
    if not version:
        return workload
    if version not in LATEST_VERSIONS:
        raise UsageError(
            f"--to-version {version}: traces are written as {' or '.join(LATEST_VERSIONS)}",
            hint="older schemas are read only; readers of today do not know them",
        )
    return replace(workload, classes=tuple(_labelled(graph, version.encode()) for graph in workload.classes))


def _labelled(graph: OpGraph, label: bytes) -> OpGraph:
    """The graph with the label as its first row: the first label of a file counts."""
    table = graph.extra
    extra = ExtraTable(
        node=np.concatenate([np.array([-1], np.int32), table.node]),
        key=np.concatenate([np.array([0], np.int32), table.key]),
        tag=np.concatenate([np.array([Tag.VERSION], np.int16), table.tag]),
        offsets=np.concatenate([[0], table.offsets + len(label)]),
        values=label + bytes(table.values),
    )
    return replace(graph, extra=extra)
