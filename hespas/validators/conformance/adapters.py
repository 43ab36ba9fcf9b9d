"""Tools under test: Hespas itself, and programs that run on the files of a case.

An adapter reads the output of a program. It returns the problems of a case, or None if the case does not
apply to the tool.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal, NamedTuple

import msgspec

from hespas.files.processes import clean_environment, isolated_script, run, tied_to_parent
from hespas.graph.errors import UsageError, clipped
from hespas.report.texts import counted
from hespas.validators.conformance.case import GROUP_FILE, PREFIX, Case
from hespas.validators.conformance.own import own_counts, own_findings, own_times

__all__ = ["AdapterName", "ForeignTool", "Problems", "own_problems"]

AdapterName = Literal["exit-code", "counts", "chakra", "astra-sim"]
Problems = Sequence[str] | None
_MOST_OUTPUT_BYTES = 64 << 20
_FINISHED = re.compile(rb"sys\[(\d{1,9})\] finished, (\d{1,18}) cycles")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_ASTRA_ARGUMENTS = (
    "--workload-configuration={prefix} --system-configuration={system} --network-configuration={network} "
    "--remote-memory-configuration={memory} --comm-group-configuration={groups} --logging-folder={log} "
    "--num-queues-per-dim=1"
)
_CHAKRA_READER = """
import json
from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata, Node
from chakra.src.third_party.utils.protolib import decodeMessage, openFileRd
for path in sys.argv[1:]:
    try:
        stream, node = openFileRd(path), Node()
        decodeMessage(stream, GlobalMetadata())
        nodes = dependencies = comm_bytes = duration_us = 0
        while decodeMessage(stream, node):
            nodes += 1
            dependencies += len(node.data_deps) + len(node.ctrl_deps)
            duration_us += node.duration_micros
            for attr in node.attr:
                if attr.name == "comm_size":
                    comm_bytes += int(getattr(attr, attr.WhichOneof("value")))
        counts = dict(nodes=nodes, dependencies=dependencies, comm_bytes=comm_bytes, duration_us=duration_us)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        counts = None
    print(json.dumps(counts), flush=True)
"""
"""Program that reads trace files with the reader of Chakra's Python package, and prints their counts."""


def own_problems(folder: Path, case: Case) -> Problems:
    """Run Hespas itself on a case: its reader, ``check``, and ``simulate`` in mode ``astra``."""
    counts = [own_counts(folder / file) for file in case.files]
    problems = _count_problems(
        case, [None if entry is None else msgspec.structs.asdict(entry) for entry in counts]
    )
    is_valid, codes = own_findings(folder, case)
    if case.check != "either" and is_valid != (case.check == "accept"):
        problems.append(f"check: {'valid' if is_valid else 'not valid'}, expected {case.check}")
    if missing := [rule for rule in case.rules if rule not in codes]:
        problems.append(f"check: {', '.join(missing)} not reported")
    if case.run != "skip":
        times = own_times(folder, case)
        if case.run == "fail" and not isinstance(times, str):
            problems.append("simulation: finishes, expected a failure")
        elif case.run == "finish":
            problems += [f"simulation: {times}"] if isinstance(times, str) else _time_problems(case, times)
    return problems


def _count_problems(case: Case, found: Sequence[Mapping[str, int] | None]) -> list[str]:
    """Compare the counts of each file with the expected ones. None is a file that was refused. Counts that a
    tool does not print are not compared.
    """
    problems: list[str] = []
    for file, expected, counts in zip(case.files, case.counts, found, strict=True):
        if counts is None and expected is not None and case.read == "accept":
            problems.append(f"{file}: refused, expected {counted(expected.nodes, 'node')}")
        elif counts is not None and expected is None and case.read == "reject":
            nodes = counted(counts.get("nodes", 0), "node")
            problems.append(f"{file}: read as {nodes}, expected to be refused")
        elif counts is not None and expected is not None:
            wanted: dict[str, int] = msgspec.structs.asdict(expected)
            both = ((name, counts[name], number) for name, number in wanted.items() if name in counts)
            texts = [f"{name} {one:,} (expected {other:,})" for name, one, other in both if one != other]
            problems += [f"{file}: {', '.join(texts)}"] if texts else []
    return problems


def _time_problems(case: Case, times: Sequence[int]) -> list[str]:
    """Compare the finish times of all ranks with the expected ones, if these are known."""
    if case.finish_ns is None or list(times) == case.finish_ns:
        return []
    rank = next(
        rank for rank, pair in enumerate(zip(times, case.finish_ns, strict=True)) if pair[0] != pair[1]
    )
    return [f"rank {rank} finishes at {times[rank]:,} ns, expected {case.finish_ns[rank]:,} ns"]


class _Run(NamedTuple):
    """Result of one run of a tool. ``abnormal`` describes an end by a limit or a signal."""

    status: int
    output: bytes
    abnormal: str


@dataclass(frozen=True, slots=True)
class ForeignTool:
    """Program under test. ``command`` is a template, ``timeout_s`` and ``memory_bytes`` limit each run."""

    command: str
    adapter: AdapterName
    timeout_s: float
    memory_bytes: int

    def problems(self, folder: Path, scratch: Path, case: Case) -> Problems:
        """Run the tool on a case whose files are in ``folder``. Raises ``UsageError`` if it cannot start."""
        adapters: Mapping[str, Callable[[Path, Path, Case], Problems]] = {
            "exit-code": self._exit_code,
            "counts": self._counts,
            "chakra": self._counts,
            "astra-sim": self._astra_sim,
        }
        return adapters[self.adapter](folder, scratch, case)

    def _commands(self, folder: Path, scratch: Path, case: Case) -> list[list[str]]:
        """Return the command of a case, or one per file if the template has ``{file}`` or ``{rank}``."""
        words = shlex.split(self.command)
        if not any(words[:1]):
            raise UsageError("`tool` is empty", hint="give a command, such as `tool='mytool {files}'`")
        names = set(_PLACEHOLDER.findall(self.command)) - {"backend", "Backend"}
        if self.adapter == "chakra":
            words = [*isolated_script(_CHAKRA_READER, python=words[0]), "{files}"]
        elif self.adapter == "astra-sim" and not names:
            words += shlex.split(_ASTRA_ARGUMENTS)
        elif not names:
            words.append("{files}")
        files = [str(folder / file) for file in case.files]
        groups = folder / GROUP_FILE
        values = {
            "folder": str(folder), "prefix": str(folder / PREFIX), "system": str(folder / "system.json"),
            "network": str(folder / "network.yml"), "memory": str(folder / "memory.json"),
            "groups": str(groups) if groups.exists() else "empty", "log": str(scratch / "log"),
            "ranks": str(case.ranks), "profile": case.profile, "backend": case.backend,
            "Backend": case.backend.capitalize(),
        }  # fmt: skip
        if unknown := names - values.keys() - {"file", "files", "rank"}:
            allowed = ", ".join(["file", "files", "rank", *values])
            raise UsageError(
                f"`tool`: unknown placeholder {{{clipped(min(unknown))}}}", hint=f"use one of {allowed}"
            )
        if not names & {"file", "rank"}:
            return [_filled(words, values, files)]
        ranks = [file.split(".")[1] for file in case.files]
        return [
            _filled(words, {**values, "file": file, "rank": rank}, files)
            for file, rank in zip(files, ranks, strict=True)
        ]

    def _run(self, command: Sequence[str], scratch: Path) -> _Run:
        with TemporaryFile() as output:
            ended = run(
                tied_to_parent(command, self.memory_bytes), time_s=self.timeout_s, folder=scratch,
                environment=clean_environment(), output=output, output_bytes=_MOST_OUTPUT_BYTES,
            )  # fmt: skip
            output.seek(0)
            content = output.read(_MOST_OUTPUT_BYTES)
        if ended.status == 127 and b"does not start: " in ended.errors:
            raise UsageError(
                ended.errors.decode("utf-8", "replace").strip(), hint="give the path of a program with `tool`"
            )
        limits = {"time": f"no end within {self.timeout_s:g} s", "output": "output without end"}
        abnormal = limits.get(ended.stopped, "")
        if not abnormal and ended.status < 0 and -ended.status != signal.SIGABRT:
            abnormal = f"crashes with {signal.Signals(-ended.status).name}"
        return _Run(ended.status, content, abnormal)

    def _exit_code(self, folder: Path, scratch: Path, case: Case) -> Problems:
        runs = [self._run(command, scratch) for command in self._commands(folder, scratch, case)]
        problems = [done.abnormal for done in runs if done.abnormal]
        accepts = not any(done.status for done in runs)
        if not problems and case.check != "either" and accepts != (case.check == "accept"):
            statuses = ", ".join(sorted({str(done.status) for done in runs}))
            expected = "0" if case.check == "accept" else "another one than 0"
            problems.append(f"exit code {statuses}, expected {expected}")
        return problems

    def _counts(self, folder: Path, scratch: Path, case: Case) -> Problems:
        """Read a JSON object or null per file from the output; a file without a line was refused."""
        problems: list[str] = []
        counts: list[dict[str, int] | None] = []
        commands = self._commands(folder, scratch, case)
        for command in commands:
            done = self._run(command, scratch)
            problems += [done.abnormal] if done.abnormal else []
            lines = [line for line in done.output.splitlines() if line.strip() == b"null" or line[:1] == b"{"]
            try:
                read = [msgspec.json.decode(line, type=dict[str, int] | None) for line in lines]
            except msgspec.DecodeError as error:
                problems.append(f"output: {error}")
                continue
            number = len(case.files) // len(commands)
            counts += (read + [None] * number)[:number]
        return problems or _count_problems(case, counts)

    def finish_ns(self, folder: Path, scratch: Path, case: Case) -> list[int]:
        """Return the time at which each rank finishes in ASTRA-sim; empty if some do not finish."""
        times = self._astra_run(folder, scratch, case)[1]
        return [times[rank] for rank in range(case.ranks)] if times.keys() == set(range(case.ranks)) else []

    def _astra_run(self, folder: Path, scratch: Path, case: Case) -> tuple[_Run, dict[int, int]]:
        done = self._run(self._commands(folder, scratch, case)[0], scratch)
        return done, {int(match[1]): int(match[2]) for match in _FINISHED.finditer(done.output)}

    def _astra_sim(self, folder: Path, scratch: Path, case: Case) -> Problems:
        """Compare the time at which each rank finishes. A failure is an exit code other than 0."""
        names = set(_PLACEHOLDER.findall(self.command))
        if case.run == "skip" or (case.backend == "aware" and not names & {"backend", "Backend"}):
            return None
        done, times = self._astra_run(folder, scratch, case)
        finished = f"{len(times):,} of {case.ranks:,} ranks finish"
        if done.abnormal:
            return [f"{done.abnormal}, {finished}"]
        if case.run == "fail":
            return [] if done.status else [f"exit code 0, {finished}, expected a failure"]
        if done.status or times.keys() != set(range(case.ranks)):
            return [f"exit code {done.status}, {finished}"]
        return _time_problems(case, [times[rank] for rank in range(case.ranks)])


def _filled(words: Sequence[str], values: Mapping[str, str], files: Sequence[str]) -> list[str]:
    """Return a command with the values of its placeholders. ``{files}`` as a whole word becomes one word per
    file. Relative paths of existing files become absolute, because the command runs in another folder.
    """
    values = {**values, "files": " ".join(files)}
    filled: list[str] = []
    for position, word in enumerate(words):
        whole = _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word)
        is_path = position or "/" in whole
        if is_path and os.path.isfile(whole):  # noqa: PTH113 - False for a long text
            whole = str(Path(whole).absolute())
        filled += files if word == "{files}" else [whole]
    return filled
