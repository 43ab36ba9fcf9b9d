"""Reader of Chakra traces: one file, or a folder of ``NAME.{rank}.et`` with ``comm_group.json``.

Ranks whose files differ only in process groups and message peers form a rank class, if their groups can be
expressed as group sets and their peers as permutations (:mod:`.peers`). Each file is hashed without these
values, and one graph is built per class. A single file is one rank of a larger job. A folder that states its
number of ranks (``num_ranks``) may lack files; these ranks are absent from the workload, which has the stated
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.checks import Faults, check_acyclic, check_file
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
)
from hespas.converters.chakra.forms import BINARY, TraceForm
from hespas.converters.chakra.own_metadata import with_stated_steps
from hespas.converters.chakra.peers import (
    Groups,
    PeerRows,
    RankPeers,
    expressible,
    highest_rank,
    peers_of_class,
    rank_peers,
    without_rows,
)
from hespas.converters.chakra.rank_map import RankMap, read_rank_map
from hespas.converters.chakra.templates import DecodedFile, FileTemplates
from hespas.converters.chakra.to_graph import to_graph
from hespas.converters.chakra.wire import EtColumns
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.format import ReadOptions, warn_of_whole_job
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.partial import missing_ranks
from hespas.graph import ABSENT, PROGRAM_BYTES, Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError, UsageError
from hespas.schemas.chakra.tables import NodeType

__all__ = ["read_chakra", "read_traces"]


@dataclass(slots=True, eq=False)
class _ChakraClass:
    """Ranks whose files are equal except for process groups and message peers. ``columns`` and ``facts`` were
    read from the file of the first of these ranks.
    """

    columns: EtColumns
    facts: AttributeFacts
    rows: PeerRows
    ranks: list[RankPeers]
    faults: Faults
    renumbered: int = 0
    """Number of ranks whose node ids start at another number than in the first rank."""


@dataclass(slots=True, eq=False)
class _ChakraJob:
    """Rank classes and process groups of a job, as far as its files have been read."""

    form: TraceForm
    groups: Groups
    group_file: bytes
    classes: dict[bytes, _ChakraClass] = field(default_factory=dict[bytes, _ChakraClass])
    templates: FileTemplates = field(default_factory=FileTemplates)


@dataclass(frozen=True, slots=True)
class _JobFiles:
    """Files of a job: ``files`` are pairs of rank and path, sorted by rank (-1 for a file name without a
    number). ``groups`` are the process groups, and ``group_file`` is the content of the file that lists them.
    """

    form: TraceForm
    name: str
    files: tuple[tuple[int, Path], ...]
    groups: Groups
    group_file: bytes
    is_directory: bool = False
    rank_map: RankMap | None = None
    """Map from ranks to files, if there is one file per class."""


def read_chakra(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read traces in the binary form, as :func:`read_traces` does."""
    return read_traces(path, options, diagnostics, BINARY)


def read_traces(path: Path, options: ReadOptions, diagnostics: Diagnostics, form: TraceForm) -> Workload:
    """Read a Chakra trace, or a directory of rank files.

    Raises :class:`FormatError` with file, node id and byte offset, and :class:`UnsupportedError` for an
    unknown schema. With ``options.lenient``, faults are recorded with the codes of the checker (``ET001``
    ...) and reading continues.
    """
    faults = Faults(str(path), None, diagnostics, options.lenient, options.recover)
    opened = _directory if path.is_dir() else _file
    source = opened(path, form, options, faults)
    job = _ChakraJob(form, source.groups, source.group_file)
    if source.rank_map is not None:
        return _mapped(source, source.rank_map, job, options, faults)
    for done, (rank, file) in enumerate(source.files):
        _read_rank(rank, file, job, options, diagnostics, alone=not source.is_directory)
        if options.progress:
            options.progress(done + 1, len(source.files))
    count, for_all = _size(source, job, options, faults)
    graphs: list[OpGraph] = []
    rank_class = np.full(count, ABSENT, np.int32)
    held: list[str] = []
    for first in job.classes.values():
        columns = first.columns
        for ranks in expressible(first.ranks, job.groups, count):
            peers = peers_of_class(columns, ranks, first.rows, job.groups, count)
            outside = [
                rank.rank for rank in ranks for groups in peers.group_sets if groups.group_of(rank.rank) < 0
            ]
            if outside:
                faults.error("ET019", f"rank {outside[0]} uses a process group but is not a member")
            rank_class[[rank.rank for rank in ranks]] = len(graphs)
            held.append(_text(columns, PROGRAM_BYTES).decode("utf-8", "replace"))
            graph = to_graph(columns, first.facts, peers, source.name, first.faults)
            graphs.append(with_stated_steps(graph, _text(columns, STEPS_ATTRIBUTE), faults.diagnostics))
        if not options.lenient:  # a checker finds cycles itself, for all formats
            check_acyclic(columns, graphs[-1], first.faults)
    renumbered = int(sum(files.renumbered for files in job.classes.values()))
    message = "ranks number the same nodes from another first id; the first rank of a class represents all"
    faults.diagnostics.info("chakra.renumbered", faults.path, message, count=renumbered)
    first = next(iter(job.classes.values()))
    if job.group_file:
        graphs[0] = replace(graphs[0], attachments={**graphs[0].attachments, FILE_NAME: job.group_file})
    metadata = {"format": job.form.name, "version": first.columns.schema or first.columns.version}
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


def _file(path: Path, form: TraceForm, options: ReadOptions, faults: Faults) -> _JobFiles:
    """Return the job of a single file, whose name may state the rank. Process groups are read from the same
    folder.
    """
    match = form.rank_file.match(path.name)
    rank = int(match["rank"]) if match and len(match["rank"]) <= MAX_RANK_DIGITS else -1
    if rank >= MAX_DEVICES:
        faults.error("ET022", f"{path.name} is named after rank {rank} (limit {MAX_DEVICES:,})")
        rank = -1
    name = match["name"] if match else form.stem(path.name)
    groups, data = read_groups(path.parent, name, faults, options.comm_groups, trace=path)
    return _JobFiles(form, name, ((rank, path),), groups, data)


def _directory(path: Path, form: TraceForm, options: ReadOptions, faults: Faults) -> _JobFiles:
    """Return all rank files of a folder. Some may be missing only if the files themselves state the number of
    ranks.
    """
    jobs: dict[str, dict[int, Path]] = {}
    for entry in sorted(path.iterdir()):
        match = form.rank_file.match(entry.name)
        if match is None:
            continue
        ranks = jobs.setdefault(match["name"], {})
        if len(match["rank"]) > MAX_RANK_DIGITS:
            faults.error("ET022", f"{entry.name} is named after rank {match['rank']}")
            continue
        rank = int(match["rank"])
        if rank in ranks:
            faults.error("ET022", f"rank {rank} has two files: {ranks[rank].name} and {entry.name}")
        ranks[rank] = entry
    if not jobs:
        raise FormatError(
            "the folder contains no rank files",
            code="ET022",
            path=str(path),
            hint=f"name rank files NAME.0{form.suffix}, NAME.1{form.suffix}, ...",
        )
    if len(jobs) > 1:
        raise FormatError(
            f"rank files of {len(jobs)} jobs: {', '.join(sorted(jobs)[:4])}",
            code="ET022",
            path=str(path),
            hint="keep one job per folder",
        )
    name, ranks = next(iter(jobs.items()))
    groups, data = read_groups(path, name, faults, options.comm_groups)
    rank_map = read_rank_map(path, list(ranks))
    if rank_map is not None:
        return _JobFiles(form, name, tuple(sorted(ranks.items())), groups, data, True, rank_map)
    for first, last in missing_ranks(entry.name for entry in path.glob(".*.missing")):
        if not all(rank in ranks for rank in range(first, min(last, MAX_DEVICES) + 1)):
            raise FormatError(
                f"the share of ranks {first}-{last} has not been written yet",
                code="ET022",
                path=str(path),
                hint="wait for it, or write it with `shard`",
            )
    count = max(ranks, default=-1) + 1
    missing = list(islice((rank for rank in range(count) if rank not in ranks), 5))
    if missing and not _job_size(_columns(next(iter(ranks.values())), form, options, Diagnostics())):
        listed = ", ".join(map(str, missing))
        faults.error("ET022", f"{count - len(ranks)} of {count} rank files are missing: rank {listed}")
        ranks = {rank: file for rank, file in ranks.items() if rank < missing[0]}
    if not ranks:
        raise FormatError(
            "the file of rank 0 is missing",
            code="ET022",
            path=str(path),
            hint="copy the files of all ranks again",
        )
    return _JobFiles(form, name, tuple(sorted(ranks.items())), groups, data, is_directory=True)


def _job_size(columns: EtColumns) -> int:
    """Return the number of ranks that a file states for its job, 0 if it states none."""
    sizes = AttributeFacts.of(columns.metadata).integers(JOB_ATTRIBUTE)
    return int(sizes.value[0]) if len(sizes.value) and 0 < sizes.value[0] <= MAX_DEVICES else 0


def _columns(path: Path, form: TraceForm, options: ReadOptions, diagnostics: Diagnostics) -> EtColumns:
    columns = read_columns(
        path,
        diagnostics,
        form=form,
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
    rank: int, path: Path, job: _ChakraJob, options: ReadOptions, diagnostics: Diagnostics, *, alone: bool
) -> None:
    """Read the file of one rank. It is checked unless an equal file of its class has been checked."""
    like = None if alone else job.templates.find(path, rank, job.groups)
    if like is not None:
        key, peers = like
        job.classes[key].ranks.append(peers)
        return
    count_before = sum(diagnostics.counts().values())
    columns = _columns(path, job.form, options, diagnostics)
    facts = AttributeFacts.of(columns.attrs)
    number = _own_rank(columns, rank, job, diagnostics, alone=alone)
    faults = Faults(str(path), number, diagnostics, options.lenient, options.recover)
    peers, rows = rank_peers(columns, facts, number, job.groups, faults)
    digest = blake2b(digest_size=32)
    for part in _hashed(columns, rows):
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part).tobytes())
    key = digest.digest()
    known_class = job.classes.get(key)
    renumbered = known_class is not None and _first_id(columns) != _first_id(known_class.columns)
    if known_class is None:
        check_file(columns, facts, faults)
        job.classes[key] = _ChakraClass(columns, facts, rows, [peers], faults)
    else:
        known_class.ranks.append(peers)
        known_class.renumbered += renumbered
    if not (alone or renumbered) and count_before == sum(diagnostics.counts().values()):
        job.templates.add(path, key, DecodedFile(columns, facts, peers, rows))


def _own_rank(
    columns: EtColumns, rank: int, job: _ChakraJob, diagnostics: Diagnostics, *, alone: bool
) -> int:
    """Return the rank of a file: the number in the file name or, if the file is read ``alone``, the rank in
    its metadata. If no process groups have been read yet, read those that the file contains.
    """
    facts = AttributeFacts.of(columns.metadata)
    own = facts.integers(RANK_ATTRIBUTE)
    if alone and len(own.value) and 0 <= own.value[0] < MAX_DEVICES:
        rank = int(own.value[0])
    rank = max(rank, 0)
    embedded = facts.texts(GROUPS_ATTRIBUTE)
    if not job.groups and len(embedded.row):
        job.group_file = facts.values(embedded)[0]
        job.groups = parse_groups(job.group_file, Faults("", rank, diagnostics, lenient=True))
    # A PyTorch trace lists groups itself; they count if no file lists any.
    io = columns.inputs
    listing = np.flatnonzero(columns.type[io.node] == NodeType.METADATA)
    if len(listing):
        document, whole = groups_of_metadata(io.values.take(listing))
        if not job.group_file and document:
            job.groups = parse_groups(document, Faults("", rank, diagnostics, lenient=True))
            job.group_file = render_groups(job.groups)
        job.groups.names.update({name: 0 for name in whole if job.groups.find(name) < 0})
    return rank


def _first_id(columns: EtColumns) -> np.uint64:
    return columns.id.min() if len(columns) else np.uint64(0)


def _hashed(columns: EtColumns, rows: PeerRows) -> Iterator[NDArray[np.generic]]:
    """Yield the columns of a file for hashing, without the values that may differ within a class."""
    hidden, payload = without_rows(columns, rows)
    attrs, meta = columns.attrs, columns.metadata
    first = _first_id(columns)  # ids may continue from rank to rank; only their differences matter
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


def _mapped(
    source: _JobFiles, rank_map: RankMap, job: _ChakraJob, options: ReadOptions, faults: Faults
) -> Workload:
    """Return the workload of a folder with a rank map, in which one file represents a class of ranks. Raise
    :class:`FormatError` if the files contradict the map.
    """
    graphs: list[OpGraph] = []
    held: list[str] = []
    metadata: dict[str, str] = {}
    for number, (rank, path) in enumerate(source.files):
        own = Faults(str(path), rank, faults.diagnostics, options.lenient, options.recover)
        columns = _columns(path, job.form, options, faults.diagnostics)
        facts = AttributeFacts.of(columns.attrs)
        own_peers, rows = rank_peers(columns, facts, rank, job.groups, own)
        check_file(columns, facts, own)
        peers = rank_map.peers(number, columns, own_peers, rows, job.groups)
        graph = to_graph(columns, facts, peers, source.name, own)
        graphs.append(with_stated_steps(graph, _text(columns, STEPS_ATTRIBUTE), faults.diagnostics))
        held.append(_text(columns, PROGRAM_BYTES).decode("utf-8", "replace"))
        if not options.lenient:
            check_acyclic(columns, graphs[-1], own)
        if not number:
            metadata = {"format": job.form.name, "version": columns.schema or columns.version} | _texts(
                columns
            )
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
    """Return a metadata attribute of a trace as bytes, empty if it is absent."""
    facts = AttributeFacts.of(columns.metadata)
    return b"".join(facts.values(facts.texts(name)))


def _joined(held: list[str]) -> dict[str, str]:
    """Return the job's metadata entry with the sizes of the programs' arguments and results, joined from one
    text per class. Return an empty dictionary if a class has no text.
    """
    return {PROGRAM_BYTES: ";".join(held)} if all(held) else {}


def _texts(columns: EtColumns) -> dict[str, str]:
    """Return metadata of the job that a file states, such as the device of its times."""
    facts = AttributeFacts.of(columns.metadata)
    texts = {key: b"".join(facts.values(facts.texts(name))) for name, key in TEXTS_OF_JOB.items()}
    return {key: text.decode("utf-8", "replace") for key, text in texts.items() if text}


def _size(source: _JobFiles, job: _ChakraJob, options: ReadOptions, faults: Faults) -> tuple[int, bool]:
    """Return the number of ranks of the job, and True if one file represents all of them. A file represents
    all ranks if the user states their number and the file communicates with all ranks only.

    Raises :class:`UsageError` if the user states fewer ranks than the groups and messages contain.
    """
    ranks = [rank for chakra_class in job.classes.values() for rank in chakra_class.ranks]
    stated_size = max(_job_size(chakra_class.columns) for chakra_class in job.classes.values())
    read = 1 + max(rank.rank for rank in ranks)
    least = 1 + highest_rank(ranks, job.groups)
    wanted = options.num_devices or 0
    if source.is_directory:
        count = max(read, stated_size, wanted)
        if count < least and not options.lenient:  # a checker reports the node
            faults.error(
                "ET019",
                f"process groups or messages name rank {least - 1}, but there are files of {count} ranks",
                hint="copy the whole set, or state the number of ranks with `num_devices`",
            )
        return count, False
    if stated_size:
        return max(stated_size, least), False
    alone = ranks[0]
    # All ranks can do the same if the rank has no peers, and no groups except of all ranks.
    named = (sorted(job.groups[number]) for number in alone.groups.values if number)
    has_peers = max(alone.peers.values, default=-1) >= 0
    if wanted and not has_peers and all(members == list(range(wanted)) for members in named):
        return wanted, True
    if wanted and wanted < least:
        raise UsageError(
            f"`num_devices={wanted}`: the trace is of rank {alone.rank}, and its groups and peers name ranks "
            f"up to {least - 1}",
            path=faults.path,
            hint=f"state `num_devices={least}` or more",
        )
    return max(wanted, least), False
