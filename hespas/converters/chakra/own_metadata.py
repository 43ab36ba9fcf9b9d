"""What a trace says of itself and of its job, in the attributes of its metadata."""

from __future__ import annotations

from dataclasses import replace

from hespas.converters.chakra.contract import DEVICE_ATTRIBUTE, Tag
from hespas.graph import STEP_FACTS, WHOLE_JOB, ExtraTable, OpGraph, StringTableBuilder, Workload
from hespas.graph.errors import UsageError
from hespas.schemas.chakra import LATEST_VERSIONS
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["texts_of_job", "with_label", "with_metadata"]


def texts_of_job(workload: Workload) -> dict[str, bytes]:
    """Return what a trace does not show, by attribute: that the program is one of a whole job, the device on
    which times were recorded, and the facts of a generated step.
    """
    keys = {WHOLE_JOB: WHOLE_JOB, DEVICE_ATTRIBUTE: "device", STEP_FACTS: STEP_FACTS}
    stated = {name: workload.metadata.get(key, "") for name, key in keys.items()}
    return {name: text.encode("utf-8", "replace") for name, text in stated.items() if text}


def with_metadata(graph: OpGraph, numbers: dict[str, int], texts: dict[str, bytes]) -> OpGraph:
    """The graph with more metadata attributes, where the file has none of that name."""
    builder = StringTableBuilder(graph.strings)
    table = graph.extra
    of_file = table.node < 0
    taken = {graph.strings[row] for row in table.key[of_file].tolist()}
    kept = [(name, AttributeField.INT64, value.to_bytes(8, "little")) for name, value in numbers.items()]
    kept += [(name, AttributeField.STRING, text) for name, text in texts.items()]
    rows = [(-1, builder.add(name), kind, value) for name, kind, value in kept if name not in taken]
    if not rows:
        return graph
    return replace(graph, strings=builder.build(), extra=table.behind(ExtraTable.from_rows(rows)))


# The version label that a trace is written with, where the user names one.


def with_label(workload: Workload, version: str) -> Workload:
    """The workload whose traces say ``version``; as it is for an empty one.

    Raises :class:`UsageError` for a version that is not written: both that are have the same bytes but for
    the label.
    """
    if not version:
        return workload
    if version not in LATEST_VERSIONS:
        raise UsageError(
            f"`target_version={version}`: traces are written as {' or '.join(LATEST_VERSIONS)}",
            hint="older schemas are read only; readers of today do not know them",
        )
    return replace(workload, classes=tuple(_labelled(graph, version.encode()) for graph in workload.classes))


def _labelled(graph: OpGraph, label: bytes) -> OpGraph:
    """The graph with the label as its first row: the first label of a file counts."""
    extra = graph.extra.behind(ExtraTable.from_rows([(-1, 0, Tag.VERSION, label)]))
    return replace(graph, extra=extra)
