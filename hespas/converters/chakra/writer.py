"""Writing of a workload as Chakra trace files: ``NAME.{rank}.et`` and ``comm_group.json`` in a folder, or one
file.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from hespas.converters.chakra.comm_groups import (
    FILE_NAME,
    MAX_RANK_DIGITS,
    GroupIds,
    check_listing,
    render_groups,
)
from hespas.converters.chakra.contract import GROUPS_ATTRIBUTE, JOB_ATTRIBUTE, RANK_ATTRIBUTE
from hespas.converters.chakra.expansion import RankValues
from hespas.converters.chakra.forms import BINARY, TraceForm
from hespas.converters.chakra.job_traces import RankTraces, TraceAccount
from hespas.converters.chakra.losses import report
from hespas.converters.chakra.lowering import unrolled
from hespas.converters.chakra.own_metadata import texts_of_job, with_label, with_metadata
from hespas.converters.chakra.rank_files import RankFolder, write_ranks
from hespas.converters.chakra.rank_map import FILE_NAME as MAP_NAME
from hespas.converters.chakra.rank_map import (
    MAX_RANKS,
    ClassDocument,
    RankMapDocument,
    groups_document,
    permutation_document,
    used_entries,
)
from hespas.converters.chakra.wire import Longs
from hespas.converters.format import Value, WriteOptions
from hespas.files.documents import encode_json
from hespas.files.streams import open_output
from hespas.graph import ABSENT, Diagnostics, GroupSet, NodeKind, OpGraph, Permutation, Workload
from hespas.graph.columns import SmallIntArray
from hespas.graph.errors import OutputError, UnsupportedError, UsageError

__all__ = ["chosen_ranks", "rank_file_name", "share_of", "write_chakra", "write_traces"]

_Entry = TypeVar("_Entry", bound=Hashable)

_MOST_FILES = 1 << 20
_MANY_FILES = 16
"""Number of files from which threads are used."""


def write_chakra(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write traces in the binary form, as :func:`write_traces` does."""
    write_traces(value, path, options, diagnostics, BINARY)


def write_traces(
    value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics, form: TraceForm
) -> None:
    """Write the chosen ranks as Chakra traces: a folder, or a file if there is only one rank.

    One trace is encoded per rank class and patched for each rank. Raises :class:`UnsupportedError` for a
    profile, :class:`UsageError` if several ranks would be written to one file or the version cannot be
    written, and :class:`OutputError` if the system refuses to write.
    """
    if not isinstance(value, Workload):
        raise UnsupportedError(
            "a profile holds measured events, not a program", hint="convert the program, or a trace of it"
        )
    value = with_label(value, options.version)
    ranks = chosen_ranks(value, options)
    value = unrolled(value, ranks, diagnostics)
    request = _WriteRequest(value, GroupIds.of(value), ranks, path, options, diagnostics, form)
    alone = len(ranks) == 1 and not (options.directory and value.num_ranks == 1)
    if len(ranks) > 1 and options.name.endswith((form.suffix, f"{form.suffix}.gz")):
        raise UsageError(
            f"{len(ranks):,} ranks need as many files, and the destination is one file",
            path=options.name,
            hint="name a directory, or choose one rank with `ranks`",
        )
    most = MAX_RANKS if options.only_classes else _MOST_FILES
    if len(ranks) > most:
        raise UnsupportedError(
            f"a folder of {len(ranks):,} files is more than {most:,}"
            if not options.only_classes
            else f"a map of {len(ranks):,} ranks is more than {most:,}",
            hint="choose some of the ranks with `ranks`, or one file per class with `only_classes`",
        )
    check_listing(value, alone=alone)
    account = _write_alone(request) if alone else _write_directory(request)
    account.report(value.name, diagnostics, form)
    report(value, request.ids, str(ranks[0]) if alone else "", diagnostics)


def chosen_ranks(workload: Workload, options: WriteOptions) -> Sequence[int]:
    """Return the ranks to write: the requested ones, or all that are available. Raise :class:`UsageError` for
    others.
    """
    if options.ranks is None:
        return range(workload.num_ranks) if workload.is_complete else workload.present.tolist()
    if sum(workload.sizes_within(options.ranks)) < len(options.ranks):
        message = f"ranks {options.ranks.start}..{options.ranks.stop - 1} are not all available"
        raise UsageError(message, path=options.name, hint="choose from the ranks that were read")
    return options.ranks


@dataclass(frozen=True, slots=True, eq=False)
class _WriteRequest:
    """Request to write traces: the workload, its ranks to write, the ``path`` and the options."""

    workload: Workload
    ids: GroupIds
    ranks: Sequence[int]
    path: Path
    options: WriteOptions
    diagnostics: Diagnostics
    form: TraceForm

    @property
    def is_packed(self) -> bool:
        """Return True if the files are gzipped."""
        return self.options.name.endswith(".gz") or self.path.suffix == ".gz"

    def job(self, numbers: dict[str, int], texts: dict[str, bytes]) -> RankTraces:
        """Return the graphs to write. Their metadata attributes are the metadata of the job, ``numbers`` and
        ``texts``.
        """
        texts = texts_of_job(self.workload) | texts
        change = partial(with_metadata, numbers=numbers, texts=texts)
        return RankTraces(self.workload, self.ids, self.diagnostics, change)


def _write_alone(request: _WriteRequest) -> TraceAccount:
    """Write the file of one rank. Its metadata state the rank, the process groups and the size of the job, as
    far as a reader cannot derive them from the file name.
    """
    workload, rank = request.workload, request.ranks[0]
    groups = request.ids.of_rank(rank)
    numbers = dict[str, int]()
    job = request.job(numbers, {GROUPS_ATTRIBUTE: render_groups(groups)} if groups else {})
    taken = workload.is_complete and workload.num_ranks > 1
    match = request.form.rank_file.match(request.options.name or request.path.name)
    rank_in_name = int(match["rank"]) if match and len(match["rank"]) <= MAX_RANK_DIGITS else 0
    if taken or rank_in_name != rank:
        numbers[RANK_ATTRIBUTE] = rank
    if taken or workload.num_ranks > job.least_ranks(rank, groups):
        numbers[JOB_ATTRIBUTE] = workload.num_ranks
    account = TraceAccount()
    for batch in job.batches(np.array([rank])):
        with open_output(request.path, packed=request.is_packed) as stream:
            for piece in request.form.content(batch.runs.writer.pieces(batch.values.variables(0))):
                stream.write(piece.data)
        account.add(batch.runs, 1)
    return account


def _write_directory(request: _WriteRequest) -> TraceAccount:
    """Write a folder with process groups and the files of all ranks, of one share of the ranks, or of one
    rank per class.
    """
    options, size = request.options, request.workload.num_ranks
    job = request.job({JOB_ATTRIBUTE: size} if len(request.ranks) < size else {}, {})
    ranks = np.asarray(request.ranks, np.int64)
    if options.shard:
        ranks = ranks[share_of(len(ranks), *options.shard)]
    folder = RankFolder(
        path=request.path,
        name=rank_file_name(request.workload, options, request.form),
        form=request.form,
        packed=request.is_packed,
        resumes=(options.resume or bool(options.cluster)) and not options.only_classes,
        syncs=bool(options.cluster),
    )
    try:
        folder.path.mkdir(exist_ok=options.resume)
        document = request.ids.document()
        if document:
            (folder.path / FILE_NAME).write_bytes(document)
        if options.only_classes:
            return _write_classes(job, ranks, folder)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=str(folder.path)) from error

    def report_progress(done: int) -> None:
        if options.progress:
            options.progress(done, len(ranks))

    if options.cluster:
        from hespas.converters.chakra.cluster import write_on_cluster

        account = write_on_cluster(job, ranks, folder, options.cluster, progress=report_progress)
    else:
        jobs = options.jobs if len(ranks) >= _MANY_FILES else 1
        account = write_ranks(job, ranks, folder, jobs=jobs, progress=report_progress)
    if folder.resumes:
        folder.remove_others({FILE_NAME} if document else set(), ranks)
    return account


def rank_file_name(workload: Workload, options: WriteOptions, form: TraceForm = BINARY) -> str:
    """Return the NAME of the rank files ``NAME.{rank}`` in a folder."""
    return options.name.removesuffix(".gz").removesuffix(form.suffix) or workload.name or "trace"


def share_of(count: int, number: int, shares: int) -> slice:
    """Divide ``count`` ranks into ``shares`` contiguous shares. Return the slice of share
    ``number``, from 1.
    """
    return slice((number - 1) * count // shares, number * count // shares)


def _write_classes(job: RankTraces, ranks: Longs, folder: RankFolder) -> TraceAccount:
    """Write one file per class, that of its lowest rank, and the map of ranks: one encoding per class."""
    account = TraceAccount()
    representative = np.full(job.workload.num_ranks, ABSENT, np.int64)
    first: dict[tuple[int, bytes], int] = {}
    documents: dict[int, ClassDocument] = {}
    group_sets: dict[GroupSet, int] = {}
    permutations: dict[Permutation, int] = {}
    for runs, members in job.rank_variants(ranks):
        rank = first.setdefault((runs.of_class, runs.pattern), int(members[0]))
        representative[members] = rank
        if rank not in documents:
            graph = runs.writer.graph
            variables = RankValues.of(graph, members[:1], job.groups, {}).variables(0)
            folder.put_pieces(rank, partial(runs.writer.pieces, variables))
            collective = graph.kind == NodeKind.COLLECTIVE
            message = (graph.kind == NodeKind.SEND) | (graph.kind == NodeKind.RECV)
            sets = _of_nodes(graph, graph.collectives.node, graph.collectives.group_set)[collective]
            ways = _of_nodes(graph, graph.p2p.node, graph.p2p.permutation)[message]
            documents[rank] = ClassDocument(
                rank=rank,
                collectives=_numbered(sets, graph.group_sets, group_sets),
                messages=_numbered(ways, graph.permutations, permutations),
            )
        account.add(runs, len(members))
    rank_map = RankMapDocument(
        num_ranks=job.workload.num_ranks,
        representative=representative.tolist(),
        classes=[documents[rank] for rank in sorted(documents)],
        group_sets=[groups_document(groups) for groups in group_sets],
        permutations=[permutation_document(way) for way in permutations],
    )
    (folder.path / MAP_NAME).write_bytes(encode_json(rank_map) + b"\n")
    return account


def _of_nodes(graph: OpGraph, nodes: SmallIntArray, rows: SmallIntArray) -> Longs:
    """Return a column of all nodes with ``rows`` at ``nodes`` and -1 elsewhere."""
    column = np.full(len(graph), -1, np.int64)
    column[nodes] = rows
    return column


def _numbered(rows: Longs, table: Sequence[_Entry], job_rows: dict[_Entry, int]) -> list[int]:
    """Convert rows of a graph's table to rows of the job's table. New entries are added to ``job_rows`` in
    order of use.
    """
    used, entries = used_entries(rows, table)
    numbers = [job_rows.setdefault(entry, len(job_rows)) for entry in entries]
    listed: list[int] = np.array([*numbers, -1])[used].tolist()
    return listed
