"""Chakra execution traces: https://github.com/mlcommons/chakra. All schema versions are read, the latest is
written.

A trace is one file per rank, ``NAME.{rank}.et``, with ``comm_group.json`` in the same folder. Importing this
module is cheap.
"""

from __future__ import annotations

import re

from hespas.converters.format import Format, Value, WriteOptions, lazily
from hespas.graph import Workload
from hespas.schemas.chakra import LATEST_VERSIONS, READ_VERSIONS

__all__ = ["FORMAT", "FORMAT_JSON", "JSON_RANK_FILE", "JSON_SCHEMA", "RANK_FILE"]

RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>[0-9]+)\.e[tg](?:\.gz)?$")
"""Pattern of a rank's file name; files of schema 0.0.1 end in ``.eg``."""

JSON_RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>[0-9]+)\.json(?:\.gz)?$")
"""Pattern of a rank's JSON file name; ``comm_group.json`` does not match."""

JSON_SCHEMA = "hespas.chakra-json/1"
"""Schema name in the documents that Hespas writes."""


def _writes_directory(value: Value, options: WriteOptions) -> bool:
    """Return True if the traces form a directory. That is the case for several ranks, and for a job of one
    rank if the user named a directory. A single rank of a larger job is written as one file.
    """
    if not isinstance(value, Workload):
        return False
    ranks = value.num_available if options.ranks is None else len(options.ranks)
    return ranks != 1 or (options.directory and value.num_ranks == 1)


_COSTS = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written", "duration_ns")
_NODES = (
    "nodes",
    "ranks",
    "id",
    "name_id",
    "op_id",
    "framework_id",
    "kind",
    "op_class",
    "resource",
    "stream",
    "rate_dtype",
    *_COSTS,
    "data_deps",
    "control_deps",
    "operands",
    "results",
    "collectives",
    "p2p",
    "contractions",
    "extra",
)
"""Fields of a rank that change where nodes without work on that rank are removed, or where a rank has no work
at all.
"""

_LOSSES = {
    "": ("name",),  # the name of a trace is that of its file
    "chakra.metadata": ("metadata",),
    "chakra.attachments": ("attachments",),
    "chakra.named": ("name_id",),
    # Recorded steps state the sum of the written times.
    "chakra.longest-time": ("duration_ns", "attachments"),
    "chakra.rounded-times": ("duration_ns", "attachments"),
    "chakra.source-location": ("source_id",),
    "chakra.permute": ("nodes", "id", "kind", *_COSTS, "data_deps", "control_deps", "p2p", "ranks", "extra"),
    "chakra.idle": (*_NODES, "attachments"),
    "chakra.empty-rank": (*_NODES, "attachments"),
    "chakra.host-transfer": ("kind", "op_class", "p2p"),
    "chakra.waits": (*_NODES, "attachments"),
    "chakra.collective-as-work": ("kind", "collectives"),
    "chakra.rounded-counts": _COSTS,
    "chakra.rounded-sizes": ("collectives", "p2p"),
    "chakra.unknown-collective": ("collectives",),
    "chakra.process-groups": ("collectives",),
    "chakra.unknown-message": ("p2p",),
    "chakra.large-product": ("contractions",),
    "chakra.tensor-size": ("operands", "results"),
    "chakra.ragged-bound": ("collectives",),
    "chakra.foreign-attribute": ("extra",),
}
"""Fields that a trace does not preserve, by the diagnostic code that the writer reports."""

FORMAT = Format(
    name="chakra",
    title="Chakra execution trace",
    suffixes=(".et",),
    specification="https://github.com/mlcommons/chakra",
    sniff=lazily("hespas.converters.chakra.sniff:score"),
    never_json=True,
    read=lazily("hespas.converters.chakra.reader:read_chakra"),
    write=lazily("hespas.converters.chakra.writer:write_chakra"),
    writes_directory=_writes_directory,
    flat=True,
    in_parts=True,
    read_versions=READ_VERSIONS,
    write_versions=LATEST_VERSIONS,
    losses=_LOSSES,
    empty_code="ET002",
    reads_options=("comm_groups", "run_time_unit"),
)

FORMAT_JSON = Format(
    name="chakra-json",
    title="Chakra execution trace, JSON",
    suffixes=(".json",),
    specification="https://github.com/mlcommons/chakra",
    sniff=lazily("hespas.converters.chakra.sniff:score_json"),
    read=lazily("hespas.converters.chakra.json.files:read_chakra_json"),
    write=lazily("hespas.converters.chakra.json.files:write_chakra_json"),
    writes_directory=_writes_directory,
    flat=True,
    in_parts=True,
    write_versions=LATEST_VERSIONS,
    losses=_LOSSES,
    reads_options=("comm_groups", "run_time_unit"),
)
