"""Chakra trace files to a workload: one file, or a directory ``NAME.{rank}.et`` with ``comm_group.json``.

Ranks whose files differ only in process groups and message peers form a class where those have a symbolic
form: each file is hashed without them, and one graph is built per class.

A file that was read without its set is one rank of its job, and a set that says so (``num_ranks``) may be
some of the ranks: the others are absent, and the job keeps its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.comm_groups import (
    FILE_NAME,
    MAX_RANK_DIGITS,
    groups_of_metadata,
    parse_groups,
    read_groups,
    render_groups,
)
from hespas.converters.chakra.contract import (
    GROUPS_ATTRIBUTE,
    JOB_ATTRIBUTE,
    RANK_ATTRIBUTE,
    STEPS_ATTRIBUTE,
    TEXTS_OF_JOB,
    AttributeFacts,
    Faults,
    check_types,
)
from hespas.converters.chakra.own_metadata import with_stated_steps
from hespas.converters.chakra.peers import (
    Groups,
    PeerRows,
    Peers,
    RankPeers,
    expressible,
    highest_rank,
    peers_of_class,
    rank_peers,
    without_rows,
)
from hespas.converters.chakra.rank_map import RankMap, read_rank_map
from hespas.converters.chakra.sniff import RANK_FILE
from hespas.converters.chakra.spelling import LARGEST_MICROS
from hespas.converters.chakra.templates import Decoded, Templates
from hespas.converters.chakra.to_graph import node_numbers, to_graph
from hespas.converters.chakra.wire import Bools, EtColumns, Longs, Words
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions, warn_of_whole_job
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.partial import missing_ranks
from hespas.graph import ABSENT, PROGRAM_BYTES, Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError, UsageError
from hespas.graph.passes import find_cycle
from hespas.schemas.chakra.tables import NodeType

__all__ = ["read_chakra"]


@dataclass(slots=True, eq=False)
class _Class:
    """A class while ranks are being read: the first rank's file stands for all."""

    columns: EtColumns
    facts: AttributeFacts
    rows: PeerRows
    ranks: list[RankPeers]
    faults: Faults
    renumbered: int = 0
    """Ranks whose ids begin with another number than those of the first one, which stand for all."""


@dataclass(slots=True, eq=False)
class _Job:
    """What has been read so far."""

    groups: Groups
    group_file: bytes
    classes: dict[bytes, _Class] = field(default_factory=dict[bytes, _Class])
    templates: Templates = field(default_factory=Templates)


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of a job: (rank, path) in order of rank (-1: not in the name), and the groups."""

    name: str
    files: tuple[tuple[int, Path], ...]
    groups: Groups
    group_file: bytes
    is_directory: bool = False
    rank_map: RankMap | None = None
    """Says for whom each file stands, where there is one per class."""


def read_chakra(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file or a directory of rank files.

    Raises :class:`FormatError` naming file, node id and byte offset, :class:`UnsupportedError` for a schema
    that is not known or cannot be recognised. A lenient reader records faults under the checker's codes
    (``ET001`` ...) and goes on.
    """
    faults = Faults(str(path), None, diagnostics, options.lenient, options.recover)
    source = _directory(path, options, faults) if path.is_dir() else _file(path, options, faults)
    job = _Job(source.groups, source.group_file)
    if source.rank_map is not None:
        return _mapped(source, source.rank_map, job, options, faults)
    for done, (rank, file) in enumerate(source.files):
        _read_rank(rank, file, job, options, diagnostics, alone=not source.is_directory)
        if options.progress:
            options.progress(done + 1, len(source.files))
    return _workload(source, job, options, faults)


def _file(path: Path, options: ReadOptions, faults: Faults) -> _Source:
    """One rank's trace; its rank is in its name. Groups may stand beside it."""
    match = RANK_FILE.match(path.name)
    stated = match is not None and len(match["rank"]) <= MAX_RANK_DIGITS
    if match and stated and int(match["rank"]) >= MAX_DEVICES:
        faults.error(
            "ET022", f"{path.name} would be the file of rank {match['rank']} (limit {MAX_DEVICES:,})"
        )
        stated = False
    name = match["name"] if match else re.sub(r"(\.e[tg])?(\.gz)?$", "", path.name) or path.name
    groups, data = read_groups(path.parent, name, faults, options.comm_groups)
    return _Source(name, ((int(match["rank"]) if match and stated else -1, path),), groups, data)


def _directory(path: Path, options: ReadOptions, faults: Faults) -> _Source:
    """All rank files of a folder: one set, without gaps unless it says how many ranks there are."""
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
            "no rank files here",
            code="ET022",
            path=str(path),
            hint="rank files are called NAME.0.et, NAME.1.et, ...",
        )
    if len(found) > 1:
        raise FormatError(
            f"rank files of {len(found)} jobs: {', '.join(sorted(found)[:4])}",
            code="ET022",
            path=str(path),
            hint="keep one job per folder",
        )
    name, ranks = next(iter(found.items()))
    groups, data = read_groups(path, name, faults, options.comm_groups)
    rank_map = read_rank_map(path, list(ranks))
    if rank_map is not None:
        return _Source(name, tuple(sorted(ranks.items())), groups, data, True, rank_map)
    _check_shares(path, ranks)
    count = max(ranks, default=-1) + 1
    missing = list(islice((rank for rank in range(count) if rank not in ranks), 5))
    if missing and not _stated_size(next(iter(ranks.values())), options):
        listed = ", ".join(map(str, missing))
        faults.error("ET022", f"{count - len(ranks)} of {count} rank files are missing: rank {listed}")
        ranks = {rank: file for rank, file in ranks.items() if rank < missing[0]}
    if not ranks:
        raise FormatError(
            "the file of rank 0 is missing", code="ET022", path=str(path), hint="copy the set again"
        )
    return _Source(name, tuple(sorted(ranks.items())), groups, data, is_directory=True)


def _check_shares(path: Path, ranks: Mapping[int, Path]) -> None:
    """Raise :class:`FormatError` for a folder of which a share has not been written yet."""
    for first, last in missing_ranks(entry.name for entry in path.glob(".*.missing")):
        if not all(rank in ranks for rank in range(first, min(last, MAX_DEVICES) + 1)):
            raise FormatError(
                f"the share of ranks {first}-{last} has not been written yet",
                code="ET022",
                path=str(path),
                hint="wait for it, or write it with `shard`",
            )


def _stated_size(path: Path, options: ReadOptions) -> int:
    """How many ranks a file says that its job has, 0 where it does not."""
    columns = _columns(path, options, Diagnostics())
    return _job_size(columns)


def _job_size(columns: EtColumns) -> int:
    stated = AttributeFacts.of(columns.metadata).integers(JOB_ATTRIBUTE)
    return int(stated.value[0]) if len(stated.value) and 0 < stated.value[0] <= MAX_DEVICES else 0


def _columns(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> EtColumns:
    columns = read_columns(
        path,
        diagnostics,
        max_bytes=options.max_bytes,
        lenient=options.lenient,
        version=options.version,
        recover=options.recover,
    )
    if not columns.schema or options.run_time_unit != "ns":
        return columns
    times = columns.duration_micros
    return replace(columns, duration_micros=np.zeros_like(times), run_ns=times)


def _read_rank(
    rank: int, path: Path, job: _Job, options: ReadOptions, diagnostics: Diagnostics, *, alone: bool
) -> None:
    """Read one file, and check it unless its class has been checked already."""
    like = None if alone else job.templates.find(path, rank, job.groups)
    if like is not None:
        key, peers = like
        job.classes[key].ranks.append(peers)
        return
    said = sum(diagnostics.counts().values())
    columns = _columns(path, options, diagnostics)
    facts = AttributeFacts.of(columns.attrs)
    number = _own_place(columns, rank, job, diagnostics, alone=alone)
    faults = Faults(str(path), number, diagnostics, options.lenient, options.recover)
    peers, rows = rank_peers(columns, facts, number, job.groups, faults)
    key = _class_key(columns, rows)
    known = job.classes.get(key)
    renumbered = known is not None and _first_id(columns) != _first_id(known.columns)
    if known is None:
        _check_file(columns, facts, faults)
        job.classes[key] = _Class(columns, facts, rows, [peers], faults)
    else:
        known.ranks.append(peers)
        known.renumbered += renumbered
    if not (alone or renumbered) and said == sum(diagnostics.counts().values()):
        job.templates.add(path, key, Decoded(columns, facts, peers, rows))


def _own_place(columns: EtColumns, rank: int, job: _Job, diagnostics: Diagnostics, *, alone: bool) -> int:
    """The rank of a file that may say rank and groups itself: one that was written alone, whose name may have
    a number that means something else.
    """
    stated = AttributeFacts.of(columns.metadata)
    own = stated.integers(RANK_ATTRIBUTE)
    if alone and len(own.value) and 0 <= own.value[0] < MAX_DEVICES:
        rank = int(own.value[0])
    rank = max(rank, 0)
    embedded = stated.texts(GROUPS_ATTRIBUTE)
    if not job.groups and len(embedded.row):
        job.group_file = stated.values(embedded)[0]
        job.groups = parse_groups(job.group_file, Faults("", rank, diagnostics, lenient=True))
    _add_process_groups(columns, rank, job, diagnostics)
    return rank


def _add_process_groups(columns: EtColumns, rank: int, job: _Job, diagnostics: Diagnostics) -> None:
    """Take the groups that a PyTorch trace lists itself, where no file does."""
    io = columns.inputs
    listing = np.flatnonzero(columns.type[io.node] == NodeType.METADATA)
    if not len(listing):
        return
    document, whole = groups_of_metadata(io.values.take(listing))
    if not job.group_file and document:
        job.groups = parse_groups(document, Faults("", rank, diagnostics, lenient=True))
        job.group_file = render_groups(job.groups)
    job.groups.names.update({name: 0 for name in whole if job.groups.find(name) < 0})


def _class_key(columns: EtColumns, rows: PeerRows) -> bytes:
    """A hash of everything but groups, peers and the number that ids begin with. Equal keys: equal files, up
    to those.
    """
    digest = blake2b(digest_size=32)
    for part in _hashed(columns, rows):
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.digest()


def _first_id(columns: EtColumns) -> np.uint64:
    return columns.id.min() if len(columns) else np.uint64(0)


def _hashed(columns: EtColumns, rows: PeerRows) -> Iterator[NDArray[np.generic]]:
    """All columns, with the values hidden that may differ within a class."""
    hidden, payload = without_rows(columns, rows)
    attrs, meta = columns.attrs, columns.metadata
    first = _first_id(columns)  # ids may continue from rank to rank: they are labels within a file
    yield from (columns.id - first, columns.type, columns.start_micros, columns.duration_micros)
    yield from (columns.ctrl_offsets, columns.ctrl_deps - first)
    yield from (columns.data_offsets, columns.data_deps - first)
    yield columns.duration_micros if columns.run_ns is None else columns.run_ns
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
    """Graphs of all classes; ranks of equal files whose groups or messages have no one form are several."""
    count, for_all = _size(source, job, options, faults)
    graphs: list[OpGraph] = []
    rank_class = np.full(count, ABSENT, np.int32)
    held: list[str] = []
    for found in job.classes.values():
        for ranks in expressible(found.ranks, job.groups, count):
            peers = peers_of_class(found.columns, ranks, found.rows, job.groups, count)
            _check_members(ranks, peers, faults)
            rank_class[[rank.rank for rank in ranks]] = len(graphs)
            held.append(_text(found.columns, PROGRAM_BYTES).decode("utf-8", "replace"))
            graph = to_graph(found.columns, found.facts, peers, source.name, found.faults)
            graphs.append(with_stated_steps(graph, _text(found.columns, STEPS_ATTRIBUTE), faults.diagnostics))
        if not options.lenient:  # a checker looks for cycles itself, over all formats
            _check_acyclic(found.columns, graphs[-1], found.faults)
    renumbered = int(sum(found.renumbered for found in job.classes.values()))
    message = "ranks number the same nodes from another id on; the first rank of a class stands for all"
    faults.diagnostics.info("chakra.renumbered", faults.path, message, count=renumbered)
    first = next(iter(job.classes.values()))
    if job.group_file:
        graphs[0] = replace(graphs[0], attachments={**graphs[0].attachments, FILE_NAME: job.group_file})
    metadata = {"format": "chakra", "version": first.columns.schema or first.columns.version}
    metadata |= _texts(first.columns) | _joined(held)
    if not source.is_directory:
        metadata[RANK_ATTRIBUTE] = str(first.ranks[0].rank)
    made = Workload(
        name=source.name,
        classes=tuple(graphs),
        rank_class=np.broadcast_to(np.int32(0), (count,)) if for_all else rank_class,
        metadata=metadata,
    )
    return warn_of_whole_job(made, "chakra", Path(faults.path), faults.diagnostics)


def _mapped(source: _Source, rank_map: RankMap, job: _Job, options: ReadOptions, faults: Faults) -> Workload:
    """The whole job of which there is a file per class. Raises :class:`FormatError` where files and map do
    not fit each other.
    """
    graphs: list[OpGraph] = []
    held: list[str] = []
    metadata: dict[str, str] = {}
    for number, (rank, path) in enumerate(source.files):
        own = Faults(str(path), rank, faults.diagnostics, options.lenient, options.recover)
        columns = _columns(path, options, faults.diagnostics)
        facts = AttributeFacts.of(columns.attrs)
        stated, rows = rank_peers(columns, facts, rank, job.groups, own)
        _check_file(columns, facts, own)
        peers = rank_map.peers(number, columns, stated, rows, job.groups)
        graph = to_graph(columns, facts, peers, source.name, own)
        graphs.append(with_stated_steps(graph, _text(columns, STEPS_ATTRIBUTE), faults.diagnostics))
        held.append(_text(columns, PROGRAM_BYTES).decode("utf-8", "replace"))
        if not options.lenient:
            _check_acyclic(columns, graphs[-1], own)
        if not number:
            metadata = {"format": "chakra", "version": columns.schema or columns.version} | _texts(columns)
        if options.progress:
            options.progress(number + 1, len(source.files))
    if job.group_file:
        graphs[0] = replace(graphs[0], attachments={**graphs[0].attachments, FILE_NAME: job.group_file})
    made = Workload(
        name=source.name,
        classes=tuple(graphs),
        rank_class=rank_map.rank_class.astype(np.int32),
        metadata=metadata | _joined(held),
    )
    return warn_of_whole_job(made, "chakra", Path(faults.path), faults.diagnostics)


def _text(columns: EtColumns, name: str) -> bytes:
    """Return the text that a trace states of its program, empty where it states none."""
    facts = AttributeFacts.of(columns.metadata)
    return b"".join(facts.values(facts.texts(name)))


def _joined(held: list[str]) -> dict[str, str]:
    """Return the metadata of a job whose rank classes hold these bytes, where all state them."""
    return {PROGRAM_BYTES: ";".join(held)} if all(held) else {}


def _texts(columns: EtColumns) -> dict[str, str]:
    """Return the metadata that a file states of its program and of the device of its times."""
    facts = AttributeFacts.of(columns.metadata)
    texts = {key: b"".join(facts.values(facts.texts(name))) for name, key in TEXTS_OF_JOB.items()}
    return {key: text.decode("utf-8", "replace") for key, text in texts.items() if text}


def _size(source: _Source, job: _Job, options: ReadOptions, faults: Faults) -> tuple[int, bool]:
    """How many ranks the job has, and whether one file stands for all of them, as the user may ask for where
    it talks with all ranks only.

    Raises :class:`UsageError` where the user states fewer than there are.
    """
    ranks = [rank for found in job.classes.values() for rank in found.ranks]
    stated = max(_job_size(found.columns) for found in job.classes.values())
    read = 1 + max(rank.rank for rank in ranks)
    least = 1 + highest_rank(ranks, job.groups)
    wanted = options.num_devices or 0
    if source.is_directory:
        count = max(read, stated, wanted)
        if count < least and not options.lenient:  # a checker tells which node it is
            faults.error(
                "ET019",
                f"process groups or messages name rank {least - 1}, and there are files of {count} ranks",
                hint="copy the whole set, or state the number of ranks with `num_devices`",
            )
        return count, False
    if stated:
        return max(stated, least), False
    alone = ranks[0]
    if wanted and _talks_with_all(alone, job.groups, wanted):
        return wanted, True
    if wanted and wanted < least:
        raise UsageError(
            f"`num_devices={wanted}`: the trace is of rank {alone.rank}, and its groups and peers name ranks "
            f"up to {least - 1}",
            path=faults.path,
            hint=f"`num_devices={least}` or more",
        )
    return max(wanted, least), False


def _talks_with_all(rank: RankPeers, groups: Groups, num_ranks: int) -> bool:
    """Whether all ranks can do what this one does: it has no peers, and no groups but of all ranks."""
    everybody = list(range(num_ranks))
    named = (sorted(groups[number]) for number in rank.groups.values if number)
    return max(rank.peers.values, default=-1) < 0 and all(members == everybody for members in named)


def _check_members(ranks: Sequence[RankPeers], peers: Peers, faults: Faults) -> None:
    """ET019: a rank that uses a group is a member of it."""
    for rank in ranks:
        for groups in peers.group_sets:
            if groups.group_of(rank.rank) < 0:
                faults.error("ET019", f"rank {rank.rank} uses a process group that it is no member of")
                return


# Structural rules of one trace file that a graph cannot express, and are therefore checked on reading.

_LISTED = 8


def _check_file(columns: EtColumns, facts: AttributeFacts, faults: Faults) -> None:
    """ET005 unique ids, ET006 known dependencies, ET007 no self-dependency, ET008 no dependency twice,
    ET009 known node types, ET010 attribute types.
    """
    _check_ids(columns, faults)
    highest = max(NodeType)
    unknown = (columns.type < 0) | (columns.type > highest)
    faults.nodes("ET009", columns, unknown, f"the node type is none of 0..{int(highest)}")
    for name, offsets, deps in (
        ("data_deps", columns.data_offsets, columns.data_deps),
        ("ctrl_deps", columns.ctrl_offsets, columns.ctrl_deps),
    ):
        _check_deps(columns, name, offsets, deps, faults)
    check_types(columns, facts, faults)
    _check_times(columns, facts, faults)


def _check_times(columns: EtColumns, facts: AttributeFacts, faults: Faults) -> None:
    """GR001: no time is negative. Microseconds of 2**63 and more are what a negative number looks like."""
    nanos = facts.integers("duration_nanos")
    for bad, message in (
        (columns.duration_micros > LARGEST_MICROS, "duration_micros is 2**63 or more: a negative time?"),
        (_marked(columns, nanos.node[nanos.value < 0]), "duration_nanos is negative"),
    ):
        hint = "write the time as it was measured, or none"
        faults.repaired("GR001", columns, bad, message, repair="taken as unknown", hint=hint)


def _check_acyclic(columns: EtColumns, graph: OpGraph, faults: Faults) -> None:
    """ET007: no node waits for itself through others. ``graph`` is that of ``columns``."""
    cycle = find_cycle(graph)
    if not cycle:
        return
    ids = [str(int(columns.id[node])) for node in cycle]
    more = f" -> ... ({len(ids) - _LISTED:,} more)" if len(ids) > _LISTED else ""
    path = " -> ".join(ids[:_LISTED]) + more
    message = f"dependency cycle, each waits for the next: {path} -> {ids[0]}"
    faults.nodes("ET007", columns, _marked(columns, np.array(cycle[:1])), message)


def _check_ids(columns: EtColumns, faults: Faults) -> None:
    order = np.argsort(columns.id, kind="stable")
    ordered = columns.id[order]
    again = np.zeros(len(columns), np.bool_)
    again[order[1:][ordered[1:] == ordered[:-1]]] = True
    hint = "a simulator would silently take the last of them; number the nodes anew"
    faults.nodes("ET005", columns, again, "another node has the same id", hint=hint)


def _check_deps(columns: EtColumns, field: str, offsets: Longs, deps: Words, faults: Faults) -> None:
    if not len(deps):
        return
    owner = np.repeat(np.arange(len(columns)), np.diff(offsets))
    missing = node_numbers(columns.id, deps) < 0
    hint = "a simulator would wait for ever; drop these dependencies or add the nodes"
    for row in np.flatnonzero(missing)[:1].tolist():
        first = f"{field} names node {int(deps[row])}, which does not exist"
        if columns.is_cut:  # it may be one of those behind the cut
            lost = f"{first}; dependencies on nodes behind the cut are left out"
            faults.lint("ET006", lost, int(missing.sum()))
        else:
            where = _marked(columns, owner[missing])
            repair = "dependencies on no node are left out"
            faults.repaired("ET006", columns, where, first, repair=repair, hint=hint)
    own: Bools = deps == columns.id[owner]
    faults.nodes("ET007", columns, _marked(columns, owner[own]), f"{field} names the node itself")
    order = np.lexsort((deps, owner))
    twice = (owner[order][1:] == owner[order][:-1]) & (deps[order][1:] == deps[order][:-1])
    faults.lint("ET008", f"an entry stands twice in {field}", int(twice.sum()))


def _marked(columns: EtColumns, nodes: Longs) -> Bools:
    marked = np.zeros(len(columns), np.bool_)
    marked[nodes] = True
    return marked
