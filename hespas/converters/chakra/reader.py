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
    ClassPeers,
    Groups,
    PeerRows,
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
class _ChakraJob:
    """Files of a job, and its rank classes and process groups as far as the files have been read. ``files``
    are pairs of rank and path, sorted by rank (-1 for a file name without a number). ``group_file`` is the
    content of the file that lists the process groups. ``rank_map`` maps ranks to files if there is one file
    per class.
    """

    form: TraceForm
    name: str
    files: tuple[tuple[int, Path], ...]
    groups: Groups
    group_file: bytes
    is_directory: bool = False
    rank_map: RankMap | None = None
    classes: dict[bytes, DecodedFile] = field(default_factory=dict[bytes, DecodedFile])
    templates: FileTemplates = field(default_factory=FileTemplates)


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
    job = opened(path, form, options, faults)
    if job.rank_map is None:
        for done, (rank, file) in enumerate(job.files):
            _read_rank(rank, file, job, options, diagnostics)
            if options.progress:
                options.progress(done + 1, len(job.files))
        count, for_all = _size(job, options, faults)
        rank_class = np.broadcast_to(np.int32(0), (count,)) if for_all else np.full(count, ABSENT, np.int32)
        classes = _expressible_classes(job, count, faults)
    else:
        rank_class = job.rank_map.rank_class.astype(np.int32)
        classes = _mapped_classes(job, job.rank_map, options, diagnostics)
    graphs: list[OpGraph] = []
    held: list[str] = []
    metadata: dict[str, str] = {}
    for decoded, ranks, peers in classes:
        columns = decoded.columns
        if rank_class.flags.writeable:  # otherwise one class has all ranks
            rank_class[ranks] = len(graphs)
        of_file = AttributeFacts.of(columns.metadata)
        held.append(of_file.text(PROGRAM_BYTES).decode("utf-8", "replace"))
        graph = to_graph(columns, decoded.facts, peers, job.name, decoded.faults)
        graphs.append(with_stated_steps(graph, of_file.text(STEPS_ATTRIBUTE), diagnostics))
        if not options.lenient:  # a checker finds cycles itself, for all formats
            check_acyclic(columns, graphs[-1], decoded.faults)
        if not metadata:
            metadata = {"format": form.name, "version": columns.schema or columns.version}
            texts = {key: of_file.text(name) for name, key in TEXTS_OF_JOB.items()}
            metadata |= {key: text.decode("utf-8", "replace") for key, text in texts.items() if text}
    renumbered = int(sum(files.renumbered for files in job.classes.values()))
    message = "ranks number the same nodes from another first id; the first rank of a class represents all"
    diagnostics.info("chakra.renumbered", faults.path, message, count=renumbered)
    if job.group_file:
        graphs[0] = replace(graphs[0], attachments={**graphs[0].attachments, FILE_NAME: job.group_file})
    if all(held):  # sizes of the programs' arguments and results, one text per class
        metadata[PROGRAM_BYTES] = ";".join(held)
    if not job.is_directory:
        metadata[RANK_ATTRIBUTE] = str(next(iter(job.classes.values())).ranks[0].rank)
    made = Workload(name=job.name, classes=tuple(graphs), rank_class=rank_class, metadata=metadata)
    return warn_of_whole_job(made, "chakra", Path(faults.path), diagnostics)


_Class = tuple[DecodedFile, list[int], ClassPeers]
"""Rank class: its decoded file, the ranks that are not in a rank map, and its group sets and permutations."""


def _expressible_classes(job: _ChakraJob, count: int, faults: Faults) -> Iterator[_Class]:
    """Yield the rank classes of a job of ``count`` ranks whose files have been read."""
    for decoded in job.classes.values():
        for ranks in expressible(decoded.ranks, job.groups, count):
            peers = peers_of_class(decoded.columns, ranks, decoded.rows, job.groups, count)
            outside = [
                rank.rank for rank in ranks for groups in peers.group_sets if groups.group_of(rank.rank) < 0
            ]
            if outside:
                faults.error("ET019", f"rank {outside[0]} uses a process group but is not a member")
            yield decoded, [rank.rank for rank in ranks], peers


def _mapped_classes(
    job: _ChakraJob, rank_map: RankMap, options: ReadOptions, diagnostics: Diagnostics
) -> Iterator[_Class]:
    """Read the files of a folder with a rank map, in which one file represents a class of ranks. Yield their
    classes. Raise :class:`FormatError` if the files contradict the map.
    """
    for number, (rank, path) in enumerate(job.files):
        decoded = _decoded(rank, path, job, options, diagnostics)
        check_file(decoded.columns, decoded.facts, decoded.faults)
        yield decoded, [], rank_map.peers(number, decoded.columns, decoded.ranks[0], decoded.rows, job.groups)
        if options.progress:
            options.progress(number + 1, len(job.files))


def _file(path: Path, form: TraceForm, options: ReadOptions, faults: Faults) -> _ChakraJob:
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
    return _ChakraJob(form, name, ((rank, path),), groups, data)


def _directory(path: Path, form: TraceForm, options: ReadOptions, faults: Faults) -> _ChakraJob:
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
        return _ChakraJob(form, name, tuple(sorted(ranks.items())), groups, data, True, rank_map)
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
    return _ChakraJob(form, name, tuple(sorted(ranks.items())), groups, data, is_directory=True)


def _job_size(columns: EtColumns) -> int:
    """Return the number of ranks that a file states for its job, 0 if it states none."""
    sizes = AttributeFacts.of(columns.metadata).integers(JOB_ATTRIBUTE)
    return int(sizes.value[0]) if len(sizes.value) and 0 < sizes.value[0] <= MAX_DEVICES else 0


def _columns(path: Path, form: TraceForm, options: ReadOptions, diagnostics: Diagnostics) -> EtColumns:
    columns = read_columns(path, diagnostics, options, form)
    if not columns.schema or options.run_time_unit != "ns":
        return columns
    times = columns.duration_micros
    return replace(columns, duration_micros=np.zeros_like(times), run_ns=times)


def _decoded(
    rank: int, path: Path, job: _ChakraJob, options: ReadOptions, diagnostics: Diagnostics
) -> DecodedFile:
    """Decode the file of one rank, and find its process groups and message peers."""
    columns = _columns(path, job.form, options, diagnostics)
    facts = AttributeFacts.of(columns.attrs)
    number = _own_rank(columns, rank, job, diagnostics)
    faults = Faults(str(path), number, diagnostics, options.lenient, options.recover)
    peers, rows = rank_peers(columns, facts, number, job.groups, faults)
    return DecodedFile(columns, facts, rows, [peers], faults)


def _read_rank(
    rank: int, path: Path, job: _ChakraJob, options: ReadOptions, diagnostics: Diagnostics
) -> None:
    """Read the file of one rank. It is checked unless an equal file of its class has been checked."""
    like = job.templates.find(path, rank, job.groups)
    if like is not None:
        key, peers = like
        job.classes[key].ranks.append(peers)
        return
    count_before = sum(diagnostics.counts().values())
    decoded = _decoded(rank, path, job, options, diagnostics)
    digest = blake2b(digest_size=32)
    for part in _hashed(decoded.columns, decoded.rows):
        digest.update(part.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part).tobytes())
    key = digest.digest()
    first_file = job.classes.setdefault(key, decoded)
    renumbered = _first_id(decoded.columns) != _first_id(first_file.columns)
    if first_file is decoded:
        check_file(decoded.columns, decoded.facts, decoded.faults)
    else:
        first_file.ranks += decoded.ranks
        first_file.renumbered += renumbered
    if job.is_directory and not renumbered and count_before == sum(diagnostics.counts().values()):
        job.templates.add(path, key, decoded)


def _own_rank(columns: EtColumns, rank: int, job: _ChakraJob, diagnostics: Diagnostics) -> int:
    """Return the rank of a file: the number in the file name or, if the file is read alone, the rank in its
    metadata. If no process groups have been read yet, read those that the file contains.
    """
    facts = AttributeFacts.of(columns.metadata)
    own = facts.integers(RANK_ATTRIBUTE)
    if not job.is_directory and len(own.value) and 0 <= own.value[0] < MAX_DEVICES:
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


def _size(job: _ChakraJob, options: ReadOptions, faults: Faults) -> tuple[int, bool]:
    """Return the number of ranks of the job, and True if one file represents all of them. A file represents
    all ranks if the user states their number and the file communicates with all ranks only.

    Raises :class:`UsageError` if the user states fewer ranks than the groups and messages contain.
    """
    ranks = [rank for chakra_class in job.classes.values() for rank in chakra_class.ranks]
    stated_size = max(_job_size(chakra_class.columns) for chakra_class in job.classes.values())
    read = 1 + max(rank.rank for rank in ranks)
    least = 1 + highest_rank(ranks, job.groups)
    wanted = options.num_devices or 0
    if job.is_directory:
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
