"""Check of any input: read it leniently, run the rules, and collect violations.

A single file of a set of per-rank files is checked as one rank; a directory is checked as a whole job.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Annotated

import numpy as np

from hespas.converters import ReadOptions, find_format, note_unread_files, refuse_unused_options
from hespas.converters.format import CommGroups, NumDevices, NumReplicas, SourceFormat
from hespas.graph import Diagnostics, Severity, Workload
from hespas.graph.errors import CheckFailedError, FormatError, HespasError, UnsupportedError, UsageError
from hespas.graph.hints import NonNegativeInt, Option, PositiveInt
from hespas.measurements.consistency import check_recording
from hespas.simulator.astra import AstraOptions
from hespas.simulator.astra.configuration import (
    Backend,
    MemoryConfig,
    NetworkConfig,
    SystemConfig,
    read_memory_config,
    read_network_config,
    read_system_config,
)
from hespas.validators.checker.execution import run_traces
from hespas.validators.checker.job import (
    CheckedInput,
    CheckedJob,
    CheckFindings,
    CheckResult,
    Profile,
    RuleReport,
    Scope,
    Violation,
)
from hespas.validators.checker.rules import RULES, find_rule

__all__ = ["CheckOptions", "check", "check_workload"]


def _config_option(help_text: str) -> Option:
    return Option(help_text, metavar="FILE", label="a configuration")


_SystemConfig = Annotated[
    Path | None, _config_option("Read ASTRA-sim's system.json; adds the rules that require it.")
]
_NetworkConfig = Annotated[
    Path | None, _config_option("Read ASTRA-sim's network.yml; adds the rules that require it.")
]
_MemoryConfig = Annotated[
    Path | None, _config_option("Read ASTRA-sim's remote memory file; adds the rules that require it.")
]
_Backend = Annotated[
    Backend | None,
    Option(
        "Use ASTRA-sim's congestion-unaware or -aware backend (default: unaware) in the simulation of "
        "`profile=astra-sim`."
    ),
]
_Queues = Annotated[
    PositiveInt,
    Option("Set queues per network dimension in the simulation of `profile=astra-sim`.", metavar="N"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of a check.

    The configuration files are files of ASTRA-sim; rules that need a missing file are skipped. If a system
    and a network are given, profile ``astra-sim`` also simulates a complete set of Chakra traces, as
    :func:`hespas.api.simulate` does in mode ``astra``. The outcome of the simulation then decides the check.

    ``format`` is the format of the input (default: detected). ``num_devices`` is the number of ranks and
    ``num_replicas`` the number of replicas among them, for inputs that do not state it. ``comm_groups`` is
    the file of process groups (default: in the folder of the input). ``keep`` limits the violations listed
    per code, ``replay_limit`` the nodes of a deadlock replay.
    """

    format: SourceFormat = None
    num_devices: NumDevices = None
    num_replicas: NumReplicas = None
    system_config: _SystemConfig = None
    network_config: _NetworkConfig = None
    memory_config: _MemoryConfig = None
    backend: _Backend = None
    queues_per_dim: _Queues = 1
    comm_groups: CommGroups = None
    keep: NonNegativeInt = 20
    replay_limit: NonNegativeInt = 1_000_000


@dataclass(frozen=True, slots=True)
class _InputChecker:
    """Checker of inputs with one profile (such as astra-sim), options and configuration files."""

    profile: Profile | None
    options: CheckOptions
    system: SystemConfig | None
    network: NetworkConfig | None
    memory: MemoryConfig | None

    @classmethod
    def of(cls, profile: Profile | None, options: CheckOptions) -> _InputChecker:
        """Read the configuration files.

        Raises ``FormatError`` for a malformed file and ``UsageError`` for options of another profile.
        """
        system, network, memory = options.system_config, options.network_config, options.memory_config
        if profile != "astra-sim" and (options.backend is not None or options.queues_per_dim != 1):
            raise UsageError(
                "`backend` and `queues_per_dim` require profile astra-sim", hint="add `profile=astra-sim`"
            )
        return cls(
            profile,
            options,
            read_system_config(system) if system else None,
            read_network_config(network) if network else None,
            read_memory_config(memory) if memory else None,
        )

    def check_workload(
        self, path: str, workload: Workload, format_name: str, findings: CheckFindings, *, is_set: bool = True
    ) -> CheckedInput:
        """Run the rules on a workload. ``is_set`` is False for one file of a set of per-rank files."""
        is_complete = workload.is_complete
        if is_complete and workload.num_ranks == 1 and "rank" in workload.metadata:
            # A trace file of rank 0 is a whole job only if it does not communicate.
            graph = workload.classes[0]
            is_complete = not len(graph.p2p) and not len(graph.collectives)
        job = CheckedJob(
            path=path,
            workload=workload,
            complete=is_complete,
            profile=self.profile,
            replay_limit=self.options.replay_limit,
            system=self.system,
            network=self.network,
            memory=self.memory,
            backend=self.options.backend,
            queues_per_dim=self.options.queues_per_dim,
            is_set=is_set,
        )
        is_sound = not findings.has_errors
        partial: list[str] = []
        unconfigured: list[str] = []
        for rule in RULES:
            level = rule.level(job.profile)
            if level is None or rule.check is None:
                continue
            if rule.scope is Scope.SET and not job.complete and rule.code not in _SINGLE_RANK_RULES:
                partial.append(rule.code)
            elif any(getattr(job, name) is None for name in rule.needs):
                unconfigured.append(rule.code)
            else:
                # Sums beyond the range of floats are infinite.
                with np.errstate(over="ignore", invalid="ignore"):
                    rule.check(job, RuleReport(rule.code, level, job, findings))
        note = findings.notes.info
        if partial:
            available = job.workload.num_available
            ranks = "one rank" if available == 1 else f"{available:,} of {job.workload.num_ranks:,} ranks"
            text = f"{ranks} of a set: {', '.join(partial)} not checked; give the directory to check them"
            note("check.single-rank", job.path, text, path=job.path)
        if unconfigured:
            text = f"no simulator configuration given: {', '.join(unconfigured)} not checked"
            note("check.no-configuration", job.path, text, path=job.path)
        is_configured = self.profile == "astra-sim" and self.system is not None and self.network is not None
        if is_sound and is_configured and is_set and workload.metadata.get("format") == "chakra":
            _run_astra_sim(job, findings)
        return CheckedInput(
            path=path,
            format=format_name,
            num_ranks=workload.num_available,
            num_classes=len(job.classes),
            num_nodes=sum(map(len, job.classes)),
            complete=job.complete,
        )

    def check_file(self, path: Path, findings: CheckFindings) -> CheckedInput:
        """Read a file leniently and run the rules. Raises the errors of the reader."""
        options = self.options
        entry = find_format(path, options.format)
        assert entry.read is not None, "find_format returns readable formats"
        diagnostics = Diagnostics(keep=max(options.keep, 20))
        note_unread_files(path, entry, diagnostics)
        reading = ReadOptions(
            lenient=True,
            num_devices=options.num_devices,
            num_replicas=options.num_replicas,
            comm_groups=options.comm_groups,
        )
        refuse_unused_options(reading, entry, path)
        value = entry.read(path, reading, diagnostics)
        if not isinstance(value, Workload):
            from hespas.converters.measured_ops.workload import measured_workload

            check_recording(value, diagnostics, str(path))
            value = measured_workload(value, diagnostics)
        _add_reader_findings(diagnostics, str(path), findings, self.profile)
        match = _RANK_FILE.fullmatch(path.name)
        if match is None or path.is_dir():
            is_one_of_many = False
        else:
            others = path.parent.glob(f"{escape(match['set'])}.*.et*")
            is_one_of_many = any(
                other.name != path.name and _RANK_FILE.fullmatch(other.name) for other in others
            )
        return self.check_workload(str(path), value, entry.name, findings, is_set=not is_one_of_many)


def check(
    paths: Sequence[Path], profile: Profile | None = None, options: CheckOptions | None = None
) -> CheckResult:
    """Check each path and return the violations. An input that cannot be read is a violation, and its error
    is listed in ``unreadable``.

    ``profile`` adds the rules of Chakra traces, or of traces that ASTRA-sim can run. Raises ``UsageError``
    without paths and ``FormatError`` for a malformed configuration file.
    """
    if not paths:
        raise UsageError("no path to check", hint="give a file, or a directory of per-rank files")
    chosen = options or CheckOptions()
    checker = _InputChecker.of(profile, chosen)
    inputs: list[CheckedInput] = []
    unreadable: list[HespasError] = []
    all_findings: list[CheckFindings] = []
    for path in paths:
        findings = CheckFindings(chosen.keep)
        all_findings.append(findings)
        try:
            inputs.append(checker.check_file(path, findings))
        except (FormatError, UnsupportedError) as error:
            unreadable.append(error)
            # An unsupported input may be valid: it does not violate a rule of its own.
            code = error.code or ("unsupported" if isinstance(error, UnsupportedError) else "unreadable")
            message = f"{error.position}: {error.text}" if error.position else error.text
            findings.add(Violation(code, Severity.ERROR, error.path or str(path), None, None, message))
    return _result(profile, inputs, all_findings, unreadable)


def check_workload(
    workload: Workload,
    profile: Profile | None = None,
    options: CheckOptions | None = None,
    *,
    path: str = "",
) -> CheckResult:
    """Check a workload in memory. Raises ``FormatError`` for a malformed configuration file."""
    chosen = options or CheckOptions()
    findings = CheckFindings(chosen.keep)
    checked = _InputChecker.of(profile, chosen).check_workload(
        path or workload.name, workload, "memory", findings
    )
    return _result(profile, [checked], [findings], [])


def _result(
    profile: Profile | None,
    inputs: list[CheckedInput],
    all_findings: list[CheckFindings],
    unreadable: list[HespasError],
) -> CheckResult:
    counts: Counter[str] = Counter()
    for findings in all_findings:
        counts.update(findings.counts)
    return CheckResult(
        profile=profile,
        inputs=tuple(inputs),
        violations=tuple(violation for findings in all_findings for violation in findings.violations),
        counts=dict(counts),
        diagnostics=tuple(note for findings in all_findings for note in findings.notes),
        unreadable=tuple(unreadable),
    )


def _add_reader_findings(
    diagnostics: Diagnostics, path: str, findings: CheckFindings, profile: Profile | None
) -> None:
    """Add the diagnostics of a reader: errors and coded warnings become violations, others become notes.

    ET018 (names of groups) gets the severity of its rule, because only simulators fail on it.
    """
    names_rule = find_rule("ET018")
    names_severity = (names_rule.level(profile) if names_rule else None) or Severity.WARNING
    num_listed: dict[str, int] = {}
    for entry in diagnostics:
        is_coded = re.fullmatch(r"(?:ET|PR)\d{3}", entry.code) is not None
        file = entry.path or path
        if entry.severity is Severity.ERROR or (is_coded and entry.severity is Severity.WARNING):
            severity = names_severity if entry.code == "ET018" else entry.severity
            is_file = entry.location in ("", entry.path, path)
            message = entry.message if is_file else f"{entry.location}: {entry.message}"
            findings.add(Violation(entry.code, severity, file, entry.rank, entry.node, message))
            num_listed[entry.code] = num_listed.get(entry.code, 0) + 1
        else:
            findings.notes.add(
                entry.code,
                entry.severity,
                entry.location,
                entry.message,
                path=file,
                rank=entry.rank,
                node=entry.node,
            )
    for code, count in diagnostics.counts().items():  # diagnostics beyond the limit are only counted
        if code in num_listed and count > num_listed[code]:
            findings.counts[code] = findings.counts.get(code, 0) + count - num_listed[code]


_SINGLE_RANK_RULES = ("ET018", "ET019", "ET028")
"""Rules of scope SET that also apply to a single rank."""


_RANK_FILE = re.compile(r"(?P<set>.*)\.\d+\.et(?:\.gz)?")


def _run_astra_sim(job: CheckedJob, findings: CheckFindings) -> None:
    """Simulate the traces as ``simulate`` does in mode ``astra``. The outcome of the simulation decides the
    check.

    If the simulation finishes, violations of rules that predict a failure become warnings. If it does not
    finish, an error is added.
    """
    assert job.system is not None, "the caller checks that it has a system"
    assert job.network is not None, "the caller checks that it has a network"
    notes = Diagnostics()
    try:
        options = AstraOptions(
            system=job.system, network=job.network, memory=job.memory, backend=job.backend or "unaware",
            queues_per_dim=job.queues_per_dim,
        )  # fmt: skip
        done = run_traces(job.workload, options, notes)
    except (CheckFailedError, FormatError, UnsupportedError, UsageError) as error:
        first = next((note for note in notes if note.severity is Severity.ERROR), None)
        rank, node = (first.rank, first.node) if first is not None else (None, None)
        text = f"ASTRA-sim does not finish: {error.message}"
        findings.add(Violation(error.code or "astra-sim", Severity.ERROR, job.path, rank, node, text))
        return
    findings.lower_errors("ASTRA-sim finishes with this configuration")
    last_ns = int(done.statistics.finish_ns.max())
    text = f"ASTRA-sim finishes all {job.workload.num_ranks:,} ranks with this configuration: {last_ns:,} ns"
    findings.notes.info("check.finishes", job.path, text, path=job.path)
