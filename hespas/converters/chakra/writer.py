"""A workload as Chakra trace files: ``NAME.{rank}.et`` and ``comm_group.json`` in a folder, or one file."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from hespas.converters.chakra.comm_groups import (
    FILE_NAME,
    MAX_RANK_DIGITS,
    GroupIds,
    check_listing,
    render_groups,
)
from hespas.converters.chakra.contract import (
    DEVICE_ATTRIBUTE,
    GROUPS_ATTRIBUTE,
    JOB_ATTRIBUTE,
    RANK_ATTRIBUTE,
    Tag,
)
from hespas.converters.chakra.from_graph import Lowered, Variables, from_graph
from hespas.converters.chakra.lowering import (
    Expanded,
    expand,
    flatten_runs,
    host_transfers,
    measured_work,
    report,
)
from hespas.converters.chakra.sniff import RANK_FILE
from hespas.converters.chakra.wire import Bools, Bytes, EtColumns, Longs
from hespas.converters.chakra.wire.encode import encode_chunks
from hespas.converters.format import Value, WriteOptions
from hespas.files.streams import open_output
from hespas.files.wire import encode_varint
from hespas.graph import (
    WHOLE_JOB,
    Diagnostics,
    ExtraTable,
    NodeKind,
    OpGraph,
    Permutation,
    StringTableBuilder,
    Workload,
)
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import InvariantError, OutputError, UnsupportedError, UsageError
from hespas.schemas.chakra import LATEST_VERSIONS
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["chosen_ranks", "write_chakra"]

# One encoded trace for all ranks of a class, patched for each: only bytes of groups and peers differ.
#
# Where a patched byte stands is found by encoding the class twice, with values that have nothing in common
# but their width. Ranks whose values have other widths get another encoding, of which a few are kept.

_PATCHABLE = (AttributeField.INT32, AttributeField.INT64, AttributeField.UINT32, AttributeField.UINT64)
_KEPT_BYTES = 64 << 20


def _encoded(columns: EtColumns) -> Bytes:
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in encode_chunks(columns)])


def _wire(value: bytes | int) -> bytes:
    """The bytes of a variable inside the trace."""
    return value if isinstance(value, bytes) else encode_varint(value)


def _placeholder(like: bytes | int, digit: int) -> bytes | int:
    """A value as wide as another one, all of whose bytes are made of ``digit``, 1 or 2."""
    if isinstance(like, bytes):
        return str(digit).encode() * len(like)
    return sum(digit << 7 * place for place in range(len(encode_varint(like))))


def _placeholders(variables: Variables, digit: int) -> Variables:
    groups = tuple(text and str(digit).encode() * len(text) for text in variables.groups)
    number = [_placeholder(value, digit) for value in variables.values()[len(groups) :]]
    whole = [value for value in number if isinstance(value, int)]
    return Variables(groups, whole[0], tuple(whole[1::2]), tuple(whole[2::2]))


@dataclass(slots=True, eq=False)
class _Template:
    """An encoded trace and, per variable, the places of its bytes, shape ``(uses, width)``."""

    data: Bytes
    places: tuple[Longs, ...]

    def patched(self, variables: Variables) -> Bytes:
        """The trace of one rank; valid until the next call."""
        for places, value in zip(self.places, variables.values(), strict=True):
            if places.size:
                self.data[places] = np.frombuffer(_wire(value), np.uint8)
        return self.data


@dataclass(slots=True, eq=False)
class _ClassWriter:
    """Encodes the ranks of one class that run the same nodes; ``found`` counts, once encoded, the nodes that
    are not said exactly.
    """

    graph: OpGraph
    found: dict[str, int] = field(default_factory=dict[str, int])
    _templates: dict[tuple[int, ...], _Template] = field(default_factory=dict[tuple[int, ...], _Template])

    def pieces(self, variables: Variables, *, alone: bool) -> Iterable[Bytes]:
        """One rank's file; valid until the next call. A rank that is ``alone`` is encoded piece by piece, the
        others are patched, which costs no pass over the nodes.
        """
        if not alone:
            return [self._patched(variables)]
        lowered = self._lowered(variables)
        return (np.frombuffer(piece, np.uint8) for piece in encode_chunks(lowered.columns))

    def _lowered(self, variables: Variables) -> Lowered:
        lowered = from_graph(self.graph, variables)
        self.found = lowered.inexact
        return lowered

    def _patched(self, variables: Variables) -> Bytes:
        widths = tuple(len(_wire(value)) for value in variables.values())
        template = self._templates.get(widths)
        if template is None:
            template = self._template(variables)
            if template is None:
                return _encoded(self._lowered(variables).columns)
            self._keep(widths, template)
        return template.patched(variables)

    def _keep(self, widths: tuple[int, ...], template: _Template) -> None:
        held = sum(len(known.data) for known in self._templates.values())
        while self._templates and held + len(template.data) > _KEPT_BYTES:
            oldest = next(iter(self._templates))
            held -= len(self._templates.pop(oldest).data)
        self._templates[widths] = template

    def _template(self, variables: Variables) -> _Template | None:
        """Encode twice and compare. None where a variable is of a type whose bytes are not its own."""
        first = self._lowered(_placeholders(variables, 1))
        if not _is_patchable(first):
            return None
        data = _encoded(first.columns)
        slots = first.slot[first.slot >= 0]
        if not len(slots):
            return _Template(data, tuple(np.empty((0, 1), np.int64) for _ in variables.values()))
        other = _encoded(self._lowered(_placeholders(variables, 2)).columns)
        if len(other) != len(data):
            raise InvariantError("two encodings of one class have different lengths")
        return _Template(data, _places(np.flatnonzero(data != other), slots, variables.values()))


def _is_patchable(lowered: Lowered) -> bool:
    rows = lowered.slot >= 0
    field_of = lowered.columns.attrs.field[rows]
    return bool((np.isin(field_of, _PATCHABLE) | (field_of == AttributeField.STRING)).all())


def _places(differ: Longs, slots: Longs, values: Sequence[bytes | int]) -> tuple[Longs, ...]:
    """Distribute the differing bytes, which stand in the order of ``slots``, among the variables."""
    widths = np.array([len(_wire(value)) for value in values])
    ends = np.cumsum(widths[slots])
    if int(ends[-1]) != len(differ):
        raise InvariantError("two encodings of one class differ in more than its variables")
    places: list[Longs] = []
    for slot, width in enumerate(widths.tolist()):
        starts = (ends - widths[slots])[slots == slot]
        places.append(
            differ[starts[:, None] + np.arange(width)] if len(starts) else np.empty((0, 1), np.int64)
        )
    return tuple(places)


if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_MOST_FILES = 1 << 20


def write_chakra(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    """Write the chosen ranks: a directory, or a file where there is one rank only.

    Costs one encoding per rank class and a patch per rank. Raises :class:`UnsupportedError` for a profile,
    :class:`UsageError` where several ranks would go to one file or the version is not written, and
    :class:`OutputError` where the system refuses.
    """
    if not isinstance(value, Workload):
        raise UnsupportedError(
            "a profile holds measured events and no program", hint="convert the program, or a trace of it"
        )
    value = _with_label(value, options.version)
    job = _Job(value, GroupIds.of(value), diagnostics)
    ranks = chosen_ranks(value, options)
    alone = len(ranks) == 1 and not (options.directory and value.num_ranks == 1)
    packed = options.name.endswith(".gz") or path.suffix == ".gz"
    if len(ranks) > 1 and options.name.endswith((".et", ".et.gz")):
        raise UsageError(
            f"{len(ranks):,} ranks are as many files, and this names one",
            path=options.name,
            hint="name a directory, or choose one rank with `ranks`",
        )
    if len(ranks) > _MOST_FILES:
        raise UnsupportedError(
            f"a folder of {len(ranks):,} files is more than {_MOST_FILES:,}",
            hint="choose some of the ranks with `ranks`",
        )
    check_listing(value, alone=alone)
    if alone:
        _write_alone(job, ranks[0], path, options, packed=packed)
    else:
        _write_directory(job, ranks, path, options, packed=packed)
    job.account.report(value.name, diagnostics)
    report(value, job.groups, str(ranks[0]) if alone else "", diagnostics)


def chosen_ranks(workload: Workload, options: WriteOptions) -> Sequence[int]:
    """The ranks to write: those wanted, or all that are here. Raises :class:`UsageError` for others."""
    if options.ranks is None:
        return range(workload.num_ranks) if workload.is_complete else workload.present.tolist()
    if sum(workload.sizes_within(options.ranks)) < len(options.ranks):
        message = f"ranks {options.ranks.start}..{options.ranks.stop - 1} are not all here"
        raise UsageError(message, path=options.name, hint="choose among the ranks that were read")
    return options.ranks


class _Runs(NamedTuple):
    """Ranks of one class that run the same nodes; how many nodes of the class they do not run, and how long
    the estimate says those take.
    """

    writer: _ClassWriter
    idle: int
    idle_ns: float
    is_empty: bool


_FINDINGS = {
    "chakra.idle": "messages and collectives are left out where a rank has no part in them "
    "(ranks: {ranks:,}; time they were given there: {idle_us:,.3f} us)",
    "chakra.empty-rank": "ranks have nothing to do; each is written as one node 'idle' of no time",
    "chakra.sub-microsecond": "computations share a microsecond with their neighbours and state 0 in "
    "duration_micros, of which ASTRA-sim makes 1 ns; duration_nanos holds the exact time",
    "chakra.named": "nodes have neither name nor anything else and are named: others read an empty frame as "
    "the end",
    "chakra.longest-time": "times of 146 years and more are rounded to us, or to the longest that a trace "
    "states",
}
"""What the ranks written may not have, or have only roughly."""
_WARNINGS = frozenset({"chakra.empty-rank", "chakra.longest-time"})


@dataclass(slots=True, eq=False)
class _Account:
    """What the ranks written so far do not have, or have only roughly; sums over ranks."""

    ranks: int = 0
    idle_ns: float = 0.0
    _ranks_of: Counter[_Runs] = field(default_factory=Counter["_Runs"])

    def add(self, runs: _Runs) -> None:
        """Count one rank."""
        self.ranks += runs.idle > 0
        self.idle_ns += runs.idle_ns
        self._ranks_of[runs] += 1

    def report(self, name: str, diagnostics: Diagnostics) -> None:
        """Say it."""
        found: Counter[str] = Counter()
        for runs, ranks in self._ranks_of.items():
            of_one = {**runs.writer.found, "chakra.idle": runs.idle, "chakra.empty-rank": int(runs.is_empty)}
            found.update({code: count * ranks for code, count in of_one.items()})
        for code, text in _FINDINGS.items():
            severity = Severity.WARNING if code in _WARNINGS else Severity.INFO
            message = text.format(ranks=self.ranks, idle_us=self.idle_ns / 1e3)
            diagnostics.add(code, severity, name, message, count=found[code])


@dataclass(slots=True, eq=False)
class _Job:
    """A workload on its way out: graphs as ranks run them, and where each permutation leads."""

    workload: Workload
    groups: GroupIds
    diagnostics: Diagnostics
    account: _Account = field(default_factory=_Account)
    _expanded: dict[int, Expanded] = field(default_factory=dict[int, Expanded])
    _runs: dict[tuple[int, bytes], _Runs] = field(default_factory=dict[tuple[int, bytes], _Runs])
    _ways: dict[Permutation, tuple[dict[int, int], dict[int, int]]] = field(
        default_factory=dict[Permutation, tuple[dict[int, int], dict[int, int]]]
    )

    def trace(
        self, rank: int, change: Callable[[OpGraph], OpGraph], *, alone: bool = False
    ) -> Iterable[Bytes]:
        """One rank's file in pieces, valid until the next call, after the ``change`` to its graph."""
        number = int(self.workload.rank_class[rank])
        expanded = self._graph(number)
        pattern = self._idle_pattern(number, rank)
        known = self._runs.get((number, pattern))
        if known is None:
            known = self._runs[number, pattern] = _runs_of(expanded, pattern, change)
        single = alone or int((self.workload.rank_class == number).sum()) == 1
        pieces = known.writer.pieces(self._variables(expanded.graph, rank), alone=single)
        self.account.add(known)
        return pieces

    def least_ranks(self, rank: int, groups: Mapping[int, Sequence[int]]) -> int:
        """How many ranks a reader of one rank's file takes its job to have, where nobody says more."""
        graph = self._graph(int(self.workload.rank_class[rank])).graph
        table = graph.p2p
        addressed = table.permutation >= 0
        sends = graph.kind[table.node[addressed]] == NodeKind.SEND
        ways: list[int] = table.permutation[addressed].tolist()
        used = set(zip(ways, sends.tolist(), strict=True))
        peers = [self._peer(graph.permutations[way], rank, sends=is_send) for way, is_send in used]
        return 1 + max([rank, *peers, *(max(members) for members in groups.values())])

    def _graph(self, number: int) -> Expanded:
        if number not in self._expanded:
            flat = flatten_runs(self.workload.classes[number], self.diagnostics)
            flat = measured_work(flat, self.diagnostics)
            expanded = expand(host_transfers(flat, self.diagnostics))
            message = (
                "permutes are written as SEND and RECV; their time is that of the SEND, "
                "on a rank that only receives of the RECV"
            )
            self.diagnostics.info("chakra.permute", flat.name, message, count=len(expanded.halves))
            self._expanded[number] = expanded
        return self._expanded[number]

    def _way(self, permutation: Permutation) -> tuple[dict[int, int], dict[int, int]]:
        """Targets and sources by rank, for permutations that list their pairs."""
        if permutation not in self._ways:
            pairs = list(permutation)
            back = {target: source for source, target in pairs}
            self._ways[permutation] = (dict(pairs), back)
        return self._ways[permutation]

    def _peer(self, permutation: Permutation, rank: int, *, sends: bool) -> int:
        if permutation.pairs is not None:
            return self._way(permutation)[0 if sends else 1].get(rank, -1)
        return permutation.target_of(rank) if sends else permutation.source_of(rank)

    def _variables(self, graph: OpGraph, rank: int) -> Variables:
        ways = graph.permutations
        return Variables(
            groups=tuple(self.groups.text(groups, rank) for groups in graph.group_sets),
            own=rank,
            targets=tuple(max(0, self._peer(way, rank, sends=True)) for way in ways),
            sources=tuple(max(0, self._peer(way, rank, sends=False)) for way in ways),
        )

    def _idle_pattern(self, number: int, rank: int) -> bytes:
        """Which group sets and directions of permutations have nothing to do on a rank. A permute to itself
        is a local copy, while a message to itself is a fault that is not hidden.
        """
        source = self.workload.classes[number]
        nobody = (-1, rank) if len(self._graph(number).halves) else (-1,)
        idle = [self.groups.is_idle(groups, rank) for groups in source.group_sets]
        for way in source.permutations:
            idle += [self._peer(way, rank, sends=sends) in nobody for sends in (True, False)]
        return bytes(idle)


def _runs_of(expanded: Expanded, pattern: bytes, change: Callable[[OpGraph], OpGraph]) -> _Runs:
    """What ranks of one class do under a pattern. A permute is left out where both its halves are."""
    idle = _idle_nodes(expanded.graph, pattern)
    graph = expanded.for_rank(idle)
    gone = idle.copy()
    gone[expanded.halves] &= idle[expanded.halves + 1]
    gone[expanded.halves + 1] = False
    return _Runs(
        _ClassWriter(change(graph)),
        int(gone.sum()),
        float(np.nansum(expanded.graph.duration_ns[gone])),
        is_empty=bool(idle.all()),
    )


def _idle_nodes(graph: OpGraph, pattern: bytes) -> Bools:
    """The nodes that do nothing under a pattern."""
    flags = np.frombuffer(pattern or b"\0", np.bool_)
    idle = np.zeros(len(graph), np.bool_)
    table = graph.collectives
    grouped = table.group_set >= 0
    idle[table.node[grouped]] = flags[table.group_set[grouped]]
    addressed = graph.p2p.permutation >= 0
    nodes = graph.p2p.node[addressed]
    receives = (graph.kind[nodes] == NodeKind.RECV).astype(np.int64)
    idle[nodes] = flags[len(graph.group_sets) + 2 * graph.p2p.permutation[addressed] + receives]
    return idle


def _rank_in_name(path: Path, options: WriteOptions) -> str:
    """The rank that the name of a file states, as its reader takes it; empty where it states none."""
    match = RANK_FILE.match(options.name or path.name)
    return str(int(match["rank"])) if match and len(match["rank"]) <= MAX_RANK_DIGITS else ""


def _write_alone(job: _Job, rank: int, path: Path, options: WriteOptions, *, packed: bool) -> None:
    """One rank's file. Taken out of its set, it says its rank, its groups and the size of its job itself."""
    groups = job.groups.of_rank(rank)
    numbers = dict[str, int]()
    taken = job.workload.is_complete and job.workload.num_ranks > 1
    if taken or int(_rank_in_name(path, options) or 0) != rank:
        numbers[RANK_ATTRIBUTE] = rank
    if taken or job.workload.num_ranks > job.least_ranks(rank, groups):
        numbers[JOB_ATTRIBUTE] = job.workload.num_ranks
    texts = _texts(job.workload) | ({GROUPS_ATTRIBUTE: render_groups(groups)} if groups else {})
    pieces = job.trace(rank, partial(_with_metadata, numbers=numbers, texts=texts), alone=True)
    with open_output(path, packed=packed) as stream:
        for piece in pieces:
            stream.write(piece.data)


def _texts(workload: Workload) -> dict[str, bytes]:
    """What nobody can tell from a trace: that the program is one of a whole job, and on which device times
    were recorded.
    """
    keys = {WHOLE_JOB: WHOLE_JOB, DEVICE_ATTRIBUTE: "device"}
    stated = {name: workload.metadata.get(key, "") for name, key in keys.items()}
    return {name: text.encode("utf-8", "replace") for name, text in stated.items() if text}


def _with_metadata(graph: OpGraph, numbers: dict[str, int], texts: dict[str, bytes]) -> OpGraph:
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


_MANY_FILES = 16
_WAITING_PER_THREAD = 4
"""Files that may wait for each thread: bounds memory where the disk is slower than the encoder."""


class _Files:
    """Writes files one after the other, or behind the encoder's back with ``jobs`` threads."""

    def __init__(self, jobs: int, *, packed: bool) -> None:
        self._packed = packed
        self._waiting: deque[Future[None]] = deque()
        self._limit = jobs * _WAITING_PER_THREAD
        self._pool: ThreadPoolExecutor | None = None
        if jobs > 1:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(jobs)

    def write(self, path: Path, pieces: Iterable[Bytes]) -> None:
        """Write one file; ``pieces`` are used up on return, the file may follow later."""
        if self._pool is None:
            with open_output(path, packed=self._packed) as stream:
                for piece in pieces:
                    stream.write(piece.data)
            return
        data = b"".join(piece.data for piece in pieces)
        self._waiting.append(self._pool.submit(self._write_whole, path, data))
        if len(self._waiting) > self._limit:
            self._waiting.popleft().result()

    def _write_whole(self, path: Path, data: bytes) -> None:
        with open_output(path, packed=self._packed) as stream:
            stream.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for each in self._waiting:
                each.result()


def _write_directory(
    job: _Job, ranks: Sequence[int], path: Path, options: WriteOptions, *, packed: bool
) -> None:
    name = options.name.removesuffix(".gz").removesuffix(".et") or job.workload.name or "trace"
    suffix = ".et.gz" if packed else ".et"
    try:
        path.mkdir()
        document = job.groups.document()
        if document:
            (path / FILE_NAME).write_bytes(document)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
    size = job.workload.num_ranks
    numbers = {JOB_ATTRIBUTE: size} if len(ranks) < size else dict[str, int]()
    change = partial(_with_metadata, numbers=numbers, texts=_texts(job.workload))
    with _Files(options.jobs if len(ranks) >= _MANY_FILES else 1, packed=packed) as files:
        for done, rank in enumerate(ranks):
            files.write(path / f"{name}.{rank}{suffix}", job.trace(rank, change))
            if options.progress:
                options.progress(done + 1, len(ranks))


# The version label that a trace is written with, where the user names one.


def _with_label(workload: Workload, version: str) -> Workload:
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
