"""Whether a graph still is the program it was read from, so that the program itself can be written.

The program is read again and compared: no mark can go stale. What may differ is what a program does not say:
times, streams, names, costs. Another structure, as passes make, is another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.forms import Form
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import Diagnostics, OpGraph
from hespas.graph.compare import graphs_equal
from hespas.graph.errors import HespasError

__all__ = ["ATTACHMENT", "Original", "Verdict", "original_of"]

ATTACHMENT = "stablehlo"

_ANNOTATIONS: dict[str, str] = {
    "duration_ns": "durations",
    "stream": "streams",
    "resource": "streams",
    "id": "names",
    "name": "names",
    "name_row": "names",
    "framework_row": "names",
    "regions.label": "names",
    "op_class": "costs",
    "rate_dtype": "costs",
    "flops": "costs",
    "useful_flops": "costs",
    "transcendentals": "costs",
    "bytes_read": "costs",
    "bytes_written": "costs",
    "collectives.comm_bytes": "costs",
    "collectives.operand_bytes": "costs",
    "collectives.result_bytes": "costs",
    "p2p.comm_bytes": "costs",
    "multiplicity": "trips",
    "regions.trips": "trips",
    "attachments": "attachments",
    "source_row": "",
}
"""Column -> what is reported not to be in the program. Lines of the file itself are another file's."""


class Original(NamedTuple):
    """A program as stored, how many values of what kind the graph has beyond it, and what its reader says of
    the file.
    """

    data: bytes
    form: Form
    beyond: dict[str, int]
    metadata: Mapping[str, str]


class Verdict(NamedTuple):
    """The original, or why there is none: ``reason`` is empty where the graph never was a program."""

    original: Original | None
    reason: str = ""


def original_of(graph: OpGraph, num_ranks: int) -> Verdict:
    """The program of a graph that all ``num_ranks`` ranks run. An attachment that cannot be read is none."""
    data = graph.attachments.get(ATTACHMENT)
    if data is None:
        return Verdict(None)
    try:
        again = read_program(data, ATTACHMENT, ReadOptions(num_devices=num_ranks), Diagnostics())
    except HespasError as error:
        return Verdict(None, f"the program attached to the graph cannot be read: {error.message}")
    if again.num_ranks != num_ranks:
        return Verdict(None, f"the program runs on {again.num_ranks} devices, the graph on {num_ranks}")
    beyond: dict[str, int] = {}
    changed: list[str] = []
    source = again.classes[0]
    for difference in graphs_equal(graph, source):
        what = _what(difference.column)
        if what is None or (difference.column == "regions.trips" and not _only_new_trips(graph, source)):
            changed.append(difference.column)
        elif what:
            beyond[what] = beyond.get(what, 0) + difference.count
    if changed:
        return Verdict(None, f"passes or edits changed the program it was read from: {', '.join(changed)}")
    return Verdict(Original(data, Form(again.metadata["form"]), beyond, again.metadata))


def _what(column: str) -> str | None:
    """What a differing column is an annotation of, None where it is the program's structure."""
    table = column.partition(".")[0]
    if table in {"extra", "contractions"}:
        return "extra" if table == "extra" else "costs"
    return _ANNOTATIONS.get(column)


def _only_new_trips(graph: OpGraph, source: OpGraph) -> bool:
    """Whether trip counts differ only where the program does not say them."""
    stated = ~np.isnan(source.regions.trips)
    return bool((graph.regions.trips[stated] == source.regions.trips[stated]).all())
