"""Metadata of a trace file: attributes about the program and its job, and the version label."""

from __future__ import annotations

from dataclasses import replace

from hespas.converters.chakra.contract import STEPS_ATTRIBUTE, TEXTS_OF_JOB, Tag
from hespas.graph import (
    PROGRAM_BYTES,
    RECORDED_STEPS,
    Diagnostics,
    ExtraTable,
    OpGraph,
    StringTableBuilder,
    Workload,
)
from hespas.graph.errors import FormatError, UsageError
from hespas.schemas.chakra import LATEST_VERSIONS
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["texts_of_class", "texts_of_job", "with_label", "with_metadata", "with_stated_steps"]


def texts_of_job(workload: Workload) -> dict[str, bytes]:
    """Return the metadata attributes that describe the job, by name. An example is the device on which times
    were recorded or for which they were estimated.
    """
    texts = {name: workload.metadata.get(key, "") for name, key in TEXTS_OF_JOB.items()}
    return {name: text.encode("utf-8", "replace") for name, text in texts.items() if text}


def texts_of_class(workload: Workload, number: int, written: OpGraph) -> dict[str, bytes]:
    """Return the metadata attributes of rank class ``number``, by name: the sizes of the program's arguments
    and results, and the recorded steps. ``written`` is the graph that the trace holds.
    """
    text = workload.program_bytes[number]
    texts = {PROGRAM_BYTES: text.encode("utf-8", "replace")} if text else {}
    graph = workload.classes[number]
    if not graph.attachments:
        return texts
    from hespas.converters.measured_ops.steps import recorded_steps_of

    steps = recorded_steps_of(graph.attachments, graph.name)
    if steps is None:
        return texts
    if steps.describes(graph):
        steps = steps.of(written)
    return texts | {STEPS_ATTRIBUTE: steps.document()}


def with_stated_steps(graph: OpGraph, document: bytes, diagnostics: Diagnostics) -> OpGraph:
    """Attach the recorded steps of a trace to its graph. ``document`` is their JSON text in the trace's
    metadata (empty: none). An invalid document is ignored with a warning.
    """
    if not document:
        return graph
    from hespas.converters.measured_ops.steps import recorded_steps_of

    attached = {RECORDED_STEPS: document}
    try:
        recorded_steps_of(attached, graph.name)
    except FormatError as error:
        message = f"ignored the metadata attribute {STEPS_ATTRIBUTE}: {error.message}"
        diagnostics.warning("chakra.recorded-steps", graph.name, message)
        return graph
    return replace(graph, attachments={**graph.attachments, **attached})


def with_metadata(graph: OpGraph, numbers: dict[str, int], texts: dict[str, bytes]) -> OpGraph:
    """Add metadata attributes to a graph. Names that its file already has stay unchanged."""
    table = graph.extra
    of_file = table.node < 0
    taken = {graph.strings[row] for row in table.key[of_file].tolist()}
    attributes = [
        (name, AttributeField.INT64, value.to_bytes(8, "little")) for name, value in numbers.items()
    ]
    attributes += [(name, AttributeField.STRING, text) for name, text in texts.items()]
    added = [attribute for attribute in attributes if attribute[0] not in taken]
    if not added:
        return graph
    builder = StringTableBuilder(graph.strings)
    rows = [(-1, builder.add(name), kind, value) for name, kind, value in added]
    return replace(graph, strings=builder.build(), extra=table.behind(ExtraTable.from_rows(rows)))


def with_label(workload: Workload, version: str) -> Workload:
    """Return the workload with ``version`` as the version label of its traces. An empty ``version`` changes
    nothing.

    Raises :class:`UsageError` for a version that cannot be written. The two writable versions differ only in
    the label.
    """
    if not version:
        return workload
    if version not in LATEST_VERSIONS:
        raise UsageError(
            f"`target_version={version}`: traces are written as {' or '.join(LATEST_VERSIONS)}",
            hint="choose one of these versions: current readers do not support older ones",
        )
    label = ExtraTable.from_rows([(-1, 0, Tag.VERSION, version.encode())])  # the first label of a file counts
    classes = tuple(replace(graph, extra=graph.extra.behind(label)) for graph in workload.classes)
    return replace(workload, classes=classes)
