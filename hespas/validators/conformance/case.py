"""Cases of the conformance kit: files of a job, and the results that a conforming tool gives for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hespas.files.wire import BYTES, decode_varint, fields
from hespas.simulator.astra.configuration import Backend
from hespas.validators.conformance.traces import TraceNode, Typed, trace

__all__ = [
    "GROUP_FILE", "PREFIX", "Case", "ConfiguredCases", "Counts", "KitCase", "Verdict", "counts_of_file",
    "counts_of_nodes", "network_text", "system_text",
]  # fmt: skip

PREFIX = "trace"
"""Rank files are ``trace.RANK.et``."""
GROUP_FILE = "comm_group.json"
Verdict = Literal["accept", "reject", "either"]
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class Counts(msgspec.Struct, frozen=True):
    """Numbers that a reader gets from one trace file: nodes, entries of both dependency lists, and the sums
    of the attribute ``comm_size`` and of the durations.
    """

    nodes: int
    dependencies: int
    comm_bytes: int
    duration_us: int


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Case of a kit. Its files are in the folder ``name`` of the archive.

    ``read`` is the result for a reader of single files, and ``counts`` the numbers of each file (null: the
    file is malformed). ``check`` is the result for a validator with the rules of ``profile``. ``rules`` are
    the rules of ``hespas-validate check`` that report the case, as errors or as warnings. ``run`` is the
    result for ASTRA-sim's analytical simulator: ``finish``, ``fail`` (it has to report that ranks do not
    finish), or ``skip`` (not defined). ``finish_ns`` has the time of each rank.
    """

    name: str
    about: str
    schema: str
    profile: Literal["chakra", "astra-sim"]
    files: list[str]
    ranks: Annotated[int, Meta(ge=1)]
    read: Verdict
    counts: list[Counts | None]
    check: Verdict
    rules: list[str]
    run: Literal["finish", "fail", "skip"]
    backend: Backend
    finish_ns: list[int] | None = None

    @property
    def kind(self) -> str:
        """Return the family of the case, such as ``frames``."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class KitCase:
    """Case with the content of its files."""

    case: Case
    files: Mapping[str, bytes]


def system_text(**changes: object) -> str:
    """Return a ``system.json``. ``algorithm`` names the algorithms of all collectives; other keywords replace
    keys (with ``_`` for ``-``), and None removes a key.
    """
    algorithm = changes.pop("algorithm", "ring")
    names = [algorithm] if isinstance(algorithm, str) else algorithm
    values: dict[str, object] = {
        "scheduling-policy": "LIFO", "endpoint-delay": 10, "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 4, "collective-optimization": "localBWAware", "local-mem-bw": 1600,
        "boost-mode": 0, **{f"{kind}-implementation": names for kind in _KINDS},
    }  # fmt: skip
    values |= {key.replace("_", "-"): value for key, value in changes.items()}
    return json.dumps({key: value for key, value in values.items() if value is not None}, indent=1) + "\n"


def network_text(
    ranks: int, topology: str = "Switch", bandwidth: float = 50.0, latency: float = 500.0
) -> str:
    """Return a ``network.yml`` with one dimension."""
    return f"topology: [{topology}]\nnpus_count: [{ranks}]\nbandwidth: [{bandwidth}]\nlatency: [{latency}]\n"


_MEMORY = '{"memory-type": "NO_MEMORY_EXPANSION"}\n'
_Ranks = Sequence[Sequence[TraceNode] | bytes]


def counts_of_nodes(nodes: Sequence[TraceNode]) -> Counts:
    """Return the counts of a file with these nodes."""
    sizes = (node.attrs.get("comm_size", 0) for node in nodes)
    numbers = (size.value if isinstance(size, Typed) else size for size in sizes)
    return Counts(
        nodes=len(nodes),
        dependencies=sum(len(node.data) + len(node.control) for node in nodes),
        comm_bytes=sum(number for number in numbers if isinstance(number, int)),
        duration_us=sum(node.micros for node in nodes),
    )


def counts_of_file(content: bytes) -> Counts:
    """Return the counts of a file of the current schema, read field by field."""
    at, frames = 0, list[tuple[int, int]]()
    while at < len(content):
        size, at = decode_varint(content, at, len(content))
        frames.append((at, at + size))
        at += size
    dependencies = size_sum = micros = 0
    for start, end in frames[1:]:
        for number, wire, value, after in fields(content, start, end):
            if number in {4, 5} and wire == BYTES:
                position = value
                while position < after:
                    _, position = decode_varint(content, position, after)
                    dependencies += 1
            elif number == 7:
                micros += value
            elif number == 10:
                inner = list(fields(content, value, after))
                name = next(
                    content[first:last] for field_number, _, first, last in inner if field_number == 1
                )
                if name == b"comm_size":
                    size_sum += next(first for field_number, _, first, _ in inner if field_number > 2)
    return Counts(len(frames) - 1, dependencies, size_sum, micros)


@dataclass(slots=True)
class ConfiguredCases:
    """Collection of cases, with defaults for what a case does not state."""

    cases: list[KitCase] = field(default_factory=list[KitCase])

    def add(
        self,
        name: str,
        about: str,
        ranks: _Ranks,
        *rules: str,
        check: Verdict | Literal["warn"] | None = None,
        read: Verdict = "accept",
        run: Literal["finish", "fail", "skip"] | None = None,
        counts: Sequence[Counts | None] | None = None,
        version: str = "1.0.0",
        profile: Literal["chakra", "astra-sim"] = "chakra",
        backend: Backend = "unaware",
        groups: Mapping[str, Sequence[int]] | str | None = None,
        system: str | None = None,
        network: str | None = None,
        memory: str = _MEMORY,
        missing: Sequence[int] = (),
    ) -> None:
        """Add a case. ``ranks`` has the nodes of each rank, or the bytes of its file with ``counts``.

        With ``rules`` the job is invalid, unless ``check`` is ``warn`` or a verdict. A simulator finishes a
        valid job and fails on others, unless ``run`` states it. ``missing`` lists ranks without a file.
        """
        contents = [content if isinstance(content, bytes) else trace(content, version) for content in ranks]
        numbers = [None if isinstance(nodes, bytes) else counts_of_nodes(nodes) for nodes in ranks]
        numbers = list(counts) if counts is not None else numbers
        present = [rank for rank in range(len(ranks)) if rank not in missing]
        rank_files = [f"{PREFIX}.{rank}.et" for rank in present]
        verdict: Verdict = "accept" if check == "warn" or not (check or rules) else check or "reject"
        files = {file: contents[rank] for file, rank in zip(rank_files, present, strict=True)}
        files["system.json"] = (system or system_text()).encode()
        files["network.yml"] = (network or network_text(len(ranks))).encode()
        files["memory.json"] = memory.encode()
        if groups is not None:
            text = groups if isinstance(groups, str) else json.dumps(groups)
            files[GROUP_FILE] = text.encode()
        case = Case(
            name=name,
            about=about,
            schema=version,
            profile=profile,
            files=rank_files,
            ranks=len(ranks),
            read=read,
            counts=[numbers[rank] for rank in present],
            check=verdict,
            rules=list(rules),
            run=run or ("finish" if verdict == "accept" else "fail"),
            backend=backend,
        )
        self.cases.append(KitCase(case, files))
