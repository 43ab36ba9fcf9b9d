"""Structure and rank rules of any input: read leniently, run the table, collect what breaks.

A single file of a set of per-rank files is checked as one rank; give the directory to check ranks together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

import numpy as np

from hespas.converters import ReadOptions, find_format, note_unread_files
from hespas.converters.measured_ops import measured_workload
from hespas.graph import Diagnostic, Diagnostics, Severity, Workload
from hespas.graph.errors import CheckFailedError, FormatError, HespasError, UnsupportedError, UsageError
from hespas.graph.hints import NonNegativeInt, PositiveInt
from hespas.measurements.consistency import check_recording
from hespas.simulator.astra import AstraOptions
from hespas.simulator.astra.configuration import (
    MemoryConfig,
    NetworkConfig,
    SystemConfig,
    read_memory_config,
    read_network_config,
    read_system_config,
)
from hespas.simulator.astra.options import Backend
from hespas.validators.checker.execution import run_traces
from hespas.validators.checker.job import (
    CheckedInput,
    CheckResult,
    Findings,
    Job,
    Profile,
    Report,
    Rule,
    Scope,
    Violation,
)
from hespas.validators.checker.rules import RULES, find_rule

__all__ = ["CheckOptions", "check", "check_workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """How to check. The configuration files are ASTRA-sim's; rules that need one not given are skipped.

    With a system and a network, profile ``astra-sim`` runs a complete set of Chakra traces as
    :func:`hespas.api.simulate` does in mode ``astra``, and its verdict is the verdict of the check.

    ``format`` overrides sniffing; ``num_devices`` is the number of ranks where the input does not say,
    ``num_replicas`` how many of them are replicas, ``comm_groups`` the file of process groups where it is not
    beside the input.
    ``keep`` bounds the findings listed per code; ``replay_limit`` the nodes of a deadlock replay.
    """

    system_config: Path | None = None
    network_config: Path | None = None
    memory_config: Path | None = None
    backend: Backend | None = None
    queues_per_dim: PositiveInt = 1
    format: str | None = None
    num_devices: PositiveInt | None = None
    num_replicas: PositiveInt | None = None
    comm_groups: Path | None = None
    keep: NonNegativeInt = 20
    replay_limit: NonNegativeInt = 1_000_000


@dataclass(frozen=True, slots=True)
class _Checker:
    """What inputs are checked for, with the configuration files read."""

    profile: Profile | None
    options: CheckOptions
    system: SystemConfig | None
    network: NetworkConfig | None
    memory: MemoryConfig | None

    @classmethod
    def of(cls, profile: Profile | None, options: CheckOptions) -> _Checker:
        """Read the configuration files.

        Raises ``FormatError`` for a broken one, and ``UsageError`` for options of another profile.
        """
        system, network, memory = options.system_config, options.network_config, options.memory_config
        if profile != "astra-sim" and (options.backend is not None or options.queues_per_dim != 1):
            raise UsageError(
                "`backend` and `queues_per_dim` belong to profile astra-sim", hint="add `profile=astra-sim`"
            )
        return cls(
            profile,
            options,
            read_system_config(system) if system else None,
            read_network_config(network) if network else None,
            read_memory_config(memory) if memory else None,
        )

    def check_workload(
        self, path: str, workload: Workload, format_name: str, findings: Findings, *, is_set: bool = True
    ) -> CheckedInput:
        """Run every rule that applies. ``is_set`` is False for one file of a set of per-rank files."""
        job = Job(
            path=path,
            workload=workload,
            complete=_is_complete(workload),
            profile=self.profile,
            replay_limit=self.options.replay_limit,
            system=self.system,
            network=self.network,
            memory=self.memory,
            backend=self.options.backend,
            queues_per_dim=self.options.queues_per_dim,
            is_set=is_set,
        )
        is_read = not findings.has_errors
        _run(job, findings)
        if is_read and _is_executable(job):
            _execute(job, findings)
        return CheckedInput(
            path=path,
            format=format_name,
            num_ranks=workload.num_available,
            num_classes=len(job.classes),
            num_nodes=sum(map(len, job.classes)),
            complete=job.complete,
        )

    def check_file(self, path: Path, findings: Findings) -> CheckedInput:
        """Read leniently, and run the rules. Raises what reading raises."""
        options = self.options
        entry = find_format(path, options.format)
        assert entry.read is not None, "find_format returns readable formats"
        found = Diagnostics(keep=max(options.keep, 20))
        note_unread_files(path, entry, found)
        reading = ReadOptions(
            lenient=True, num_devices=options.num_devices, num_replicas=options.num_replicas
        )
        if options.comm_groups is not None:
            reading = replace(reading, comm_groups=options.comm_groups)
        value = entry.read(path, reading, found)
        if not isinstance(value, Workload):
            check_recording(value, found, str(path))
            value = measured_workload(value, found)
        _take_over(found, str(path), findings, self.profile)
        return self.check_workload(str(path), value, entry.name, findings, is_set=not _has_siblings(path))


def check(
    paths: Sequence[Path], profile: Profile | None = None, options: CheckOptions | None = None
) -> CheckResult:
    """Check each path. An input that cannot be read becomes a violation and an entry of ``unreadable``.

    ``profile`` adds the rules of Chakra traces, or of those that ASTRA-sim can run. Raises ``UsageError``
    without paths and ``FormatError`` for a broken configuration file.
    """
    if not paths:
        raise UsageError("nothing to check", hint="give a file, or a directory of per-rank files")
    chosen = options or CheckOptions()
    checker = _Checker.of(profile, chosen)
    inputs: list[CheckedInput] = []
    unreadable: list[HespasError] = []
    found: list[Findings] = []
    for path in paths:
        findings = Findings(chosen.keep)
        found.append(findings)
        try:
            inputs.append(checker.check_file(path, findings))
        except (FormatError, UnsupportedError) as error:
            unreadable.append(error)
            findings.add(_unreadable(path, error))
    return _result(profile, inputs, found, unreadable)


def check_workload(
    workload: Workload,
    profile: Profile | None = None,
    options: CheckOptions | None = None,
    *,
    path: str = "",
) -> CheckResult:
    """Check a job that is already in memory. Raises ``FormatError`` for a broken configuration."""
    chosen = options or CheckOptions()
    findings = Findings(chosen.keep)
    checked = _Checker.of(profile, chosen).check_workload(path or workload.name, workload, "memory", findings)
    return _result(profile, [checked], [findings], [])


def _result(
    profile: Profile | None,
    inputs: list[CheckedInput],
    found: list[Findings],
    unreadable: list[HespasError],
) -> CheckResult:
    counts: Counter[str] = Counter()
    for findings in found:
        counts.update(findings.counts)
    return CheckResult(
        profile=profile,
        inputs=tuple(inputs),
        violations=tuple(violation for findings in found for violation in findings.violations),
        counts=dict(counts),
        diagnostics=tuple(note for findings in found for note in findings.notes),
        unreadable=tuple(unreadable),
    )


def _take_over(found: Diagnostics, path: str, findings: Findings, profile: Profile | None) -> None:
    """Coded findings and errors of a reader become violations, the rest stays diagnostics. How groups are
    named matters as much as the profile's table says: only a simulator stumbles over it.
    """
    naming = find_rule("ET018")
    named = (naming.level(profile) if naming else None) or Severity.WARNING
    kept: dict[str, int] = {}
    for diagnostic in found:
        coded = re.fullmatch(r"(?:ET|PR)\d{3}", diagnostic.code) is not None
        if diagnostic.severity is Severity.ERROR or (coded and diagnostic.severity is Severity.WARNING):
            violation = _violation(diagnostic, path)
            findings.add(replace(violation, severity=named) if violation.code == "ET018" else violation)
            kept[diagnostic.code] = kept.get(diagnostic.code, 0) + 1
        else:
            findings.notes.add(
                diagnostic.code,
                diagnostic.severity,
                diagnostic.location,
                diagnostic.message,
                path=diagnostic.path or path,
                rank=diagnostic.rank,
                node=diagnostic.node,
            )
    for code, count in found.counts().items():  # what the reader counted but did not keep
        if code in kept and count > kept[code]:
            findings.counts[code] = findings.counts.get(code, 0) + count - kept[code]


def _violation(diagnostic: Diagnostic, path: str) -> Violation:
    told = diagnostic.location in ("", diagnostic.path, path)
    where = "" if told else f"{diagnostic.location}: "
    return Violation(
        diagnostic.code,
        diagnostic.severity,
        diagnostic.path or path,
        diagnostic.rank,
        diagnostic.node,
        where + diagnostic.message,
    )


def _unreadable(path: Path, error: HespasError) -> Violation:
    """The violation of an input that could not be read, under the rule of the error where it has one;
    ``unsupported`` where nothing is wrong with the input.
    """
    where = f"{error.position}: " if error.position else ""
    kind = "unsupported" if isinstance(error, UnsupportedError) else "unreadable"
    place = error.path or str(path)
    return Violation(error.code or kind, Severity.ERROR, place, None, None, where + error.text)


def _is_complete(workload: Workload) -> bool:
    """Whether all ranks of a job are there.

    A trace file that says that it is rank 0 is a whole job only if it talks to nobody.
    """
    if not workload.is_complete or workload.num_ranks > 1 or "rank" not in workload.metadata:
        return workload.is_complete
    graph = workload.classes[0]
    return not len(graph.p2p) and not len(graph.collectives)


def _run(job: Job, findings: Findings) -> None:
    """Run every rule that applies; say once which could not."""
    partial: list[str] = []
    unconfigured: list[str] = []
    for rule in RULES:
        level = rule.level(job.profile)
        if level is None or rule.check is None:
            continue
        if rule.scope is Scope.SET and not job.complete and rule.code not in _WITHOUT_OTHERS:
            partial.append(rule.code)
        elif _lacks(rule, job):
            unconfigured.append(rule.code)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # sums past what a float holds are infinite
                rule.check(job, Report(rule.code, level, job, findings))
    note = findings.notes.info
    if partial:
        here = job.workload.num_available
        which = "one rank" if here == 1 else f"{here:,} of {job.workload.num_ranks:,} ranks"
        text = f"{which} of a set: {', '.join(partial)} not checked; give the directory to check them"
        note("check.single-rank", job.path, text, path=job.path)
    if unconfigured:
        text = f"no simulator configuration given: {', '.join(unconfigured)} not checked"
        note("check.no-configuration", job.path, text, path=job.path)


_RANK_FILE = re.compile(r"(?P<set>.*)\.\d+\.et(?:\.gz)?")


def _has_siblings(path: Path) -> bool:
    """Return True for the file of one rank that has those of other ranks in its folder."""
    match = _RANK_FILE.fullmatch(path.name)
    if match is None or path.is_dir():
        return False
    others = path.parent.glob(f"{escape(match['set'])}.*.et*")
    return any(other.name != path.name and _RANK_FILE.fullmatch(other.name) for other in others)


def _is_executable(job: Job) -> bool:
    """Return True for whole sets of Chakra traces with all that ASTRA-sim's run needs."""
    is_configured = job.profile == "astra-sim" and job.system is not None and job.network is not None
    return is_configured and job.is_set and job.workload.metadata.get("format") == "chakra"


def _execute(job: Job, findings: Findings) -> None:
    """Run the traces as ``simulate`` does in mode ``astra``, and make the outcome the verdict of the check.

    A finished run leaves rules that predict its failure as warnings. What stops a run is an error.
    """
    assert job.system is not None, "executable jobs have a system"
    assert job.network is not None, "executable jobs have a network"
    notes = Diagnostics()
    try:
        options = AstraOptions(
            system=job.system, network=job.network, memory=job.memory, backend=job.backend or "unaware",
            queues_per_dim=job.queues_per_dim,
        )  # fmt: skip
        done = run_traces(job.workload, options, notes)
    except (CheckFailedError, FormatError, UnsupportedError, UsageError) as error:
        first = next((each for each in notes if each.severity is Severity.ERROR), None)
        rank, node = (first.rank, first.node) if first is not None else (None, None)
        text = f"ASTRA-sim does not finish it: {error.message}"
        findings.add(Violation(error.code or "astra-sim", Severity.ERROR, job.path, rank, node, text))
        return
    findings.lower_errors("ASTRA-sim finishes with this configuration all the same")
    last_ns = int(done.statistics.finish_ns.max())
    text = f"ASTRA-sim finishes all {job.workload.num_ranks:,} ranks with this configuration: {last_ns:,} ns"
    findings.notes.info("check.finishes", job.path, text, path=job.path)


_WITHOUT_OTHERS = ("ET018", "ET019", "ET028")
"""Set rules that say something about a single rank, too."""


def _lacks(rule: Rule, job: Job) -> bool:
    return any(getattr(job, name) is None for name in rule.needs)
