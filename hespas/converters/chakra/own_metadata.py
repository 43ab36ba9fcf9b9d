"""What a trace says of itself and of its job, in the attributes of its metadata."""

from __future__ import annotations

from dataclasses import replace

from hespas.converters.chakra.contract import STEPS_ATTRIBUTE, TEXTS_OF_JOB, Tag
from hespas.graph import PROGRAM_BYTES, Diagnostics, ExtraTable, OpGraph, StringTableBuilder, Workload
from hespas.graph.errors import FormatError, UsageError
from hespas.schemas.chakra import LATEST_VERSIONS
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["texts_of_class", "texts_of_job", "with_label", "with_metadata", "with_stated_steps"]


def texts_of_job(workload: Workload) -> dict[str, bytes]:
    """Return the attributes that state what nodes do not: that the program is one of a whole job, and on
    which device times were recorded or for which they were estimated.
    """
    stated = {name: workload.metadata.get(key, "") for name, key in TEXTS_OF_JOB.items()}
    return {name: text.encode("utf-8", "replace") for name, text in stated.items() if text}


def texts_of_class(workload: Workload, number: int, written: OpGraph) -> dict[str, bytes]:
    """Return what a trace states of its own rank class, of which it holds the graph ``written``: the bytes of
    its program that nodes do not state, and the steps that were recorded.
    """
    classes = workload.metadata.get(PROGRAM_BYTES, "").split(";")
    text = classes[number] if len(classes) == len(workload.classes) else ""
    texts = {PROGRAM_BYTES: text.encode("utf-8", "replace")} if text else {}
    return texts | _steps_text(workload.classes[number], written)


def _steps_text(graph: OpGraph, written: OpGraph) -> dict[str, bytes]:
    if not graph.attachments:
        return {}
    from hespas.converters.measured_ops import recorded_steps_of

    steps = recorded_steps_of(graph.attachments, graph.name)
    if steps is None:
        return {}
    if steps.describes(graph):
        steps = steps.of(written)
    return {STEPS_ATTRIBUTE: steps.document()}


def with_stated_steps(graph: OpGraph, document: bytes, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph with the recorded steps that its trace states; another document is ignored, with a
    warning.
    """
    if not document:
        return graph
    from hespas.converters.measured_ops import RECORDED_STEPS, recorded_steps_of

    attached = {RECORDED_STEPS: document}
    try:
        recorded_steps_of(attached, graph.name)
    except FormatError as error:
        message = f"ignored the metadata attribute {STEPS_ATTRIBUTE}: {error.message}"
        diagnostics.warning("chakra.recorded-steps", graph.name, message)
        return graph
    return replace(graph, attachments={**graph.attachments, **attached})


def with_metadata(graph: OpGraph, numbers: dict[str, int], texts: dict[str, bytes]) -> OpGraph:
    """The graph with more metadata attributes, where the file has none of that name."""
    table = graph.extra
    of_file = table.node < 0
    taken = {graph.strings[row] for row in table.key[of_file].tolist()}
    kept = [(name, AttributeField.INT64, value.to_bytes(8, "little")) for name, value in numbers.items()]
    kept += [(name, AttributeField.STRING, text) for name, text in texts.items()]
    added = [each for each in kept if each[0] not in taken]
    if not added:
        return graph
    builder = StringTableBuilder(graph.strings)
    rows = [(-1, builder.add(name), kind, value) for name, kind, value in added]
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
