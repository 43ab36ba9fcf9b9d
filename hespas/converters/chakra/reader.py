"""Chakra trace files to a workload: one file, or a directory ``NAME.{rank}.et`` with ``comm_group.json``.

Ranks whose files differ only in process groups and message peers form a class: each file is hashed without
those, and one graph is built per class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.checks import check_acyclic, check_file
from hespas.converters.chakra.codec import read_columns
from hespas.converters.chakra.columns import EtColumns
from hespas.converters.chakra.comm_groups import FILE_NAME, parse_groups, read_groups
from hespas.converters.chakra.contract import GROUPS_ATTRIBUTE, RANK_ATTRIBUTE
from hespas.converters.chakra.facts import AttributeFacts
from hespas.converters.chakra.faults import Faults
from hespas.converters.chakra.naming import MAX_RANK_DIGITS, RANK_FILE
from hespas.converters.chakra.peers import (
    Groups,
    PeerRows,
    Peers,
    RankPeers,
    peers_of_class,
    rank_peers,
    without_rows,
)
from hespas.converters.chakra.to_graph import to_graph
from hespas.converters.format import ReadOptions
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.columns import SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["read_chakra"]


@dataclass(slots=True, eq=False)
class _Class:
    """A class while ranks are being read: the first rank's file stands for all."""

    columns: EtColumns
    facts: AttributeFacts
    rows: PeerRows
    ranks: list[RankPeers]
    faults: Faults


@dataclass(slots=True, eq=False)
class _Job:
    """What has been read so far."""

    groups: Groups
    group_file: bytes
    classes: dict[bytes, _Class] = field(default_factory=dict[bytes, _Class])


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of a job: (rank, path) in order of rank (-1: not in the name), and the groups."""

    name: str
    files: tuple[tuple[int, Path], ...]
    groups: Groups
    group_file: bytes
    is_directory: bool = False


def read_chakra(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file or a directory of rank files.

    Raises :class:`FormatError` naming file, node id and byte offset, :class:`UnsupportedError` for a schema
    that is not known or cannot be told. A lenient reader records faults under the checker's codes
    (``ET001`` ...) and goes on.
    """
    faults = Faults(str(path), None, diagnostics, options.lenient)
    source = _directory(path, faults) if path.is_dir() else _file(path, faults)
    job = _Job(source.groups, source.group_file)
    for done, (rank, file) in enumerate(source.files):
        _read_rank(rank, file, job, options, diagnostics)
        if options.progress:
            options.progress(done + 1, len(source.files))
    return _workload(source, job, options, faults)


def _file(path: Path, faults: Faults) -> _Source:
    """One rank's trace; its rank is in its name. Groups may stand beside it."""
    match = RANK_FILE.match(path.name)
    stated = match is not None and len(match["rank"]) <= MAX_RANK_DIGITS
    groups, data = read_groups(path.parent, faults)
    name = match["name"] if match else re.sub(r"(\.e[tg])?(\.gz)?$", "", path.name) or path.name
    return _Source(name, ((int(match["rank"]) if match and stated else -1, path),), groups, data)


def _directory(path: Path, faults: Faults) -> _Source:
    """All rank files of a folder, which must be one set without gaps."""
    found: dict[str, dict[int, Path]] = {}
    for entry in sorted(path.iterdir()):
        match = RANK_FILE.match(entry.name)
        if match is None:
            continue
        ranks = found.setdefault(match["name"], {})
        if len(match["rank"]) > MAX_RANK_DIGITS:
            faults.error("ET022", f"{entry.name} would be the file of rank {match['rank']}")
            continue
        rank = int(match["rank"])
        if rank in ranks:
            faults.error("ET022", f"rank {rank} has two files: {ranks[rank].name} and {entry.name}")
        ranks[rank] = entry
    if not found:
        raise FormatError(
            "ET022: no rank files here",
            path=str(path),
            hint="rank files are called NAME.0.et, NAME.1.et, ...",
        )
    if len(found) > 1:
        raise FormatError(
            f"ET022: rank files of {len(found)} jobs: {', '.join(sorted(found)[:4])}",
            path=str(path),
            hint="keep one job per folder",
        )
    name, ranks = next(iter(found.items()))
    count = max(ranks, default=-1) + 1
    missing = list(islice((rank for rank in range(count) if rank not in ranks), 5))
    if missing:
        listed = ", ".join(map(str, missing))
        faults.error("ET022", f"{count - len(ranks)} of {count} rank files are missing: rank {listed}")
        ranks = {rank: file for rank, file in ranks.items() if rank < missing[0]}
    if not ranks:
        raise FormatError("ET022: the file of rank 0 is missing", path=str(path), hint="copy the set again")
    groups, data = read_groups(path, faults)
    return _Source(name, tuple(sorted(ranks.items())), groups, data, is_directory=True)


def _read_rank(rank: int, path: Path, job: _Job, options: ReadOptions, diagnostics: Diagnostics) -> None:
    """Read one file, and check it unless its class has been checked already."""
    columns = read_columns(
        path,
        diagnostics,
        max_bytes=options.max_bytes,
        lenient=options.lenient,
        version=options.version,
        recover=options.recover,
    )
    facts = AttributeFacts.of(columns.attrs)
    number = _own_place(columns, rank, job, diagnostics)
    faults = Faults(str(path), number, diagnostics, options.lenient)
    peers, rows = rank_peers(columns, facts, number, job.groups, faults)
    key = _class_key(columns, rows)
    known = job.classes.get(key)
    if known is None:
        check_file(columns, facts, faults)
        job.classes[key] = _Class(columns, facts, rows, [peers], faults)
    else:
        known.ranks.append(peers)


def _own_place(columns: EtColumns, rank: int, job: _Job, diagnostics: Diagnostics) -> int:
    """The rank of a file that may say rank and groups itself: one that was written alone."""
    stated = AttributeFacts.of(columns.metadata)
    if rank < 0:
        own = stated.integers(RANK_ATTRIBUTE)
        rank = int(own.value[0]) if len(own.value) and 0 <= own.value[0] < 1 << 31 else 0
    embedded = stated.texts(GROUPS_ATTRIBUTE)
    if not job.groups and len(embedded.row):
        job.group_file = stated.values(embedded)[0]
        job.groups = parse_groups(job.group_file, Faults("", rank, diagnostics, lenient=True))
    return rank


def _class_key(columns: EtColumns, rows: PeerRows) -> bytes:
    """A hash of everything but groups and peers. Equal keys: equal files, up to those."""
    digest = blake2b(digest_size=32)
    for part in _hashed(columns, rows):
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.digest()


def _hashed(columns: EtColumns, rows: PeerRows) -> Iterator[NDArray[np.generic]]:
    """All columns, with the values hidden that may differ within a class."""
    hidden, payload = without_rows(columns, rows)
    attrs, meta = columns.attrs, columns.metadata
    yield from (columns.id, columns.type, columns.start_micros, columns.duration_micros)
    yield from (columns.ctrl_offsets, columns.ctrl_deps, columns.data_offsets, columns.data_deps)
    yield from (attrs.offsets, attrs.key, attrs.field, attrs.doc_row, hidden)
    yield np.where(attrs.has_payload | hidden, np.uint64(0), attrs.bits)
    yield from (columns.inputs.node, columns.outputs.node, meta.key, meta.field, meta.bits)
    for io in (columns.inputs, columns.outputs):
        yield from (
            part for texts in (io.values, io.shapes, io.types) for part in (texts.data, texts.offsets)
        )
    for texts in (columns.name, payload, attrs.doc, meta.payload, meta.doc):
        yield from (texts.data, texts.offsets)
    yield np.frombuffer("\0".join((columns.version, *attrs.keys, "\1", *meta.keys)).encode(), np.uint8)


def _workload(source: _Source, job: _Job, options: ReadOptions, faults: Faults) -> Workload:
    """Graphs of all classes; a class whose messages have no permutation falls apart into ranks."""
    alone = len(source.files) == 1 and not source.is_directory
    count = (options.num_devices or 1) if alone else len(source.files)
    graphs: list[OpGraph] = []
    one: SmallIntArray = np.broadcast_to(np.int32(0), (count,))  # as many as the user states
    rank_class = one if alone else np.zeros(count, np.int32)
    for found in job.classes.values():
        for ranks in _expressible(found, job.groups, count):
            peers = peers_of_class(found.columns, ranks, found.rows, job.groups, count)
            _check_members(ranks, peers, faults)
            if not alone:
                rank_class[[rank.rank for rank in ranks]] = len(graphs)
            graphs.append(to_graph(found.columns, found.facts, peers, source.name, found.faults))
        if not options.lenient:  # a checker looks for cycles itself, over all formats
            check_acyclic(found.columns, graphs[-1], found.faults)
    first = next(iter(job.classes.values()))
    if job.group_file:
        graphs[0] = replace(graphs[0], attachments={FILE_NAME: job.group_file})
    metadata = {"format": "chakra", "version": first.columns.schema or first.columns.version}
    if alone:
        metadata[RANK_ATTRIBUTE] = str(first.ranks[0].rank)
    return Workload(name=source.name, classes=tuple(graphs), rank_class=rank_class, metadata=metadata)


def _expressible(found: _Class, groups: Groups, count: int) -> list[list[RankPeers]]:
    try:
        peers_of_class(found.columns, found.ranks, found.rows, groups, count)
    except ValueError:
        return [[rank] for rank in found.ranks]
    return [found.ranks]


def _check_members(ranks: Sequence[RankPeers], peers: Peers, faults: Faults) -> None:
    """ET019: a rank that uses a group is a member of it."""
    for rank in ranks:
        for groups in peers.group_sets:
            if groups.group_of(rank.rank) < 0:
                faults.error("ET019", f"rank {rank.rank} uses a process group that it is no member of")
                return
