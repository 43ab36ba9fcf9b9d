"""``hespas-validate check``, ``roundtrip``, ``capture``, ``privacy``, ``conform`` and ``noise``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from hespas.api.attacks import privacy as attack
from hespas.api.checks import check as check_inputs
from hespas.api.checks import roundtrip as convert_and_back
from hespas.api.checks import validate_capture
from hespas.api.conformance import conform as run_conformance
from hespas.api.noise_curves import noise as run_noisy
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit, flagged, is_quiet, print_message, report_diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import INPUT, OUTPUT, Option
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import bytes_text, count_text, counted

if TYPE_CHECKING:
    from hespas.validators.capture import CaptureCheck

__all__ = ["capture", "check", "conform", "noise", "privacy", "roundtrip"]

_MAX_DIFFERENCES = 10

_ListRules = Annotated[bool, Option("List the rules and exit.")]


@command(check_inputs, has_page=True)
def check(call: Call, *, list_rules: _ListRules = False) -> None:
    """Check the structure of any workload: ids, dependencies, cycles, sizes, matching across ranks.

    hespas-validate check traces/ --profile astra-sim
    """
    from hespas import api

    if list_rules:
        _list_rules(call)
        return
    if not call.several("source"):
        raise UsageError("PATH is required", hint="hespas-validate check traces/")
    done = call.run(api.check)
    call.write_json(done.to_json())
    call.write_html(done)
    result = done.details
    for violation in result.violations:
        position = violation.path
        position += f": rank {violation.rank}" if violation.rank is not None else ""
        position += f": node {violation.node}" if violation.node is not None else ""
        emit(f"{violation.severity.value} {violation.code} {position}: {flagged(violation.message)}")
    for note in result.diagnostics:
        print_message(f"note: {note.message} [{note.code}]")
    listed = Counter(violation.code for violation in result.violations)
    for code, count in result.counts.items():
        if count > listed[code]:
            emit(f"{code}: {count_text(count)} in total, {count_text(listed[code])} printed")
    for error in result.unreadable:
        if error.hint:
            emit(f"  try: {flagged(error.hint)}")
    for checked in result.inputs:
        emit(
            f"{checked.path} ({checked.format}): {counted(checked.num_ranks, 'rank')} in "
            f"{counted(checked.num_classes, 'class')}, {counted(checked.num_nodes, 'node')}"
        )
    if result.valid:
        warnings = sum(result.counts.values())
        emit("valid" + (f", {counted(warnings, 'warning')}" if warnings else ""))
    elif {entry.code for entry in result.violations if entry.severity.value == "error"} != {"unsupported"}:
        emit("NOT valid")
    else:  # unsupported inputs may be valid
        emit("not all checked" if result.inputs else "not checked")
    if result.exit_code:
        raise typer.Exit(result.exit_code)


@command(convert_and_back, progress="round trips", panels=(OUTPUT, INPUT), has_page=True)
def roundtrip(call: Call) -> None:
    """Convert files through every pair of formats and back; report what each pair keeps, as a matrix.

    hespas-validate roundtrip step.mlir --html kept.html
    """
    from hespas import api

    report = call.run(api.roundtrip)
    call.write_json(report.to_json())
    call.write_html(report)
    done = report.details
    for file in done.skipped:
        print_message(f"note: {file.path} ({file.format}): skipped, it is {file.skipped}")
    for file in done.inputs:
        for code, count in file.findings.items():
            times = f" ({count:,} times)" if count > 1 else ""
            print_message(f"note: {file.path}: its reader reports {code}{times}")
    from hespas.validators.roundtrip import matrix_table

    emit(matrix_table(done).to_text())
    for cell in done.cells:
        for word, part in (("cannot express", cell.lost), ("changes", cell.changed)):
            if part:
                listed = ", ".join(
                    f"{column.column} ({count_text(column.changed)}/{count_text(column.known)})"
                    + (" UNREPORTED" if column.column in cell.unreported else "")
                    for column in part
                )
                emit(f"{cell.source} -> {cell.via} {word}: {listed}")
        for message, count in cell.refused.items():
            emit(f"{cell.source} -> {cell.via} refuses {counted(count, 'file')}: {flagged(message)}")
        for message, count in cell.unreadable.items():
            problem = f"wrote {counted(count, 'file')} that cannot be read (UNREADABLE)"
            emit(f"{cell.source} -> {cell.via} {problem}: {flagged(message)}")
    if any(cell.unreadable for cell in done.cells):
        verdict = "some written files cannot be read back"
    else:
        verdict = "all losses are reported" if done.valid else "some losses are UNREPORTED"
    skipped = f", {counted(len(done.skipped), 'profile')} skipped" if done.skipped else ""
    emit(f"{counted(len(done.inputs), 'file')}{skipped}: {verdict}")
    if not done.valid:
        raise typer.Exit(1)


@command(validate_capture)
def capture(call: Call) -> None:
    """Verify a captured program against a trace of its run: operations, order, collectives and bytes.

    hespas-validate capture step.mlir step.xplane.pb
    """
    from hespas import api

    done = call.run(api.validate_capture)
    call.write_json(done.to_json())
    report_diagnostics(call.diagnostics, call["trace"])
    _print_capture(done.details)
    emit(done.headline())
    if not done.equal:
        raise typer.Exit(1)


def _print_capture(details: CaptureCheck) -> None:
    """Print the comparison of a capture with a trace: the counts, the explained differences, and the first of
    the other differences.
    """
    if not is_quiet():
        unexplained = sum(not entry.explained for entry in details.operations)
        bytes_differ = "" if details.captured_bytes == details.measured_bytes else "yes"
        order = details.order
        dependencies = order.checked + order.inside + order.unknown
        captured, measured = map(count_text, (details.captured_operations, details.measured_operations))
        collectives = (f"{details.captured_collectives:,}", f"{details.measured_collectives:,}")
        rows = [
            ("operations", captured, measured, f"{unexplained:,}"),
            ("collectives", *collectives, f"{len(details.collectives):,}"),
            (
                "their bytes",
                bytes_text(details.captured_bytes),
                bytes_text(details.measured_bytes),
                bytes_differ,
            ),
            ("dependencies", f"{dependencies:,}", f"{order.checked:,}", f"{order.violated:,}"),
            ("device time", "", f"{details.joined:.1%}", "" if details.joined == 1.0 else "yes"),
        ]
        header = (Column("what", " "), *columns("number", "captured", "measured", "different", write=str))
        emit(table_from_rows(header, rows).to_text())
        reasons: dict[str, dict[str, None]] = {}
        for entry in details.operations:
            if entry.explained:
                reasons.setdefault(entry.explained, {})[entry.operation] = None
        for reason, names in reasons.items():
            shown = ", ".join(list(names)[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
            emit(f"{counted(len(names), 'operation')} differ in count ({shown}): {reason}")
        if details.combined:
            emit(
                f"{counted(details.combined, 'collective')} combined by the compiler, with the same kinds, "
                "groups and total bytes"
            )
        if details.reordered:
            emit(f"{counted(details.reordered, 'rank')} with the same collectives in another order")
        for note in details.notes:
            emit(f"note: {flagged(note)}")
    operations = [entry for entry in details.operations if not entry.explained]
    for entry in operations[:_MAX_DIFFERENCES]:
        emit(
            f"rank {entry.rank}: {entry.operation}: {entry.captured:g} captured, {entry.measured:g} measured"
        )
    for violation in details.order.violations[:_MAX_DIFFERENCES]:
        emit(
            f"rank {violation.rank}, run {violation.run}: {violation.after} began "
            f"{violation.early_ns / 1e3:,.3f} us before {violation.before}, on which it depends, ended"
        )
    for difference in details.collectives[:_MAX_DIFFERENCES]:
        texts = f"{difference.captured or 'none'} captured, {difference.measured or 'none'} measured"
        emit(f"rank {difference.rank}, collective {difference.place}: {texts}")
    listed = min(len(operations), _MAX_DIFFERENCES) + min(len(details.order.violations), _MAX_DIFFERENCES)
    listed += min(len(details.collectives), _MAX_DIFFERENCES)
    left = details.differences - listed - (details.joined < 1.0)
    if left > 0:
        emit(f"{counted(left, 'difference')} more")


def _list_rules(call: Call) -> None:
    """Print the rules, or write them as JSON."""
    from hespas.validators.checker import RULES

    if call.json_file:
        call.check_outputs()
        call.write_json([{"code": rule.code, "title": rule.title} for rule in RULES])
        return
    rows = [(rule.code, rule.title) for rule in RULES]
    emit(table_from_rows(columns("text", "code", "rule"), rows).to_text())


@command(attack, progress="attacking", has_page=True)
def privacy(call: Call) -> None:
    """Attack obfuscated workloads with 20 public models, and compare their simulated times.

    hespas-validate privacy traces/ shared/ --model llama-3-8b
    """
    from hespas import api

    done = call.run(api.privacy)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(done.diagnostics, done.original)
    emit(done.table().to_text())
    emit(done.headline())


@command(run_conformance, progress="cases", panels=(OUTPUT, INPUT), has_page=True)
def conform(call: Call) -> None:
    """Test a tool with 200 sets of execution traces whose results are known; name each case that fails.

    hespas-validate conform --tool ./AstraSim_Analytical_Congestion_Unaware --adapter astra-sim
    """
    from hespas import api
    from hespas.validators.conformance import failures_table, kinds_table

    report = call.run(api.conform)
    call.write_json(report.to_json())
    call.write_html(report)
    if not is_quiet():
        emit(kinds_table(report.details).to_text())
    if report.failures:
        emit(failures_table(report.details).to_text())
    emit(report.headline())
    if not report.valid:
        raise typer.Exit(1)


@command(run_noisy, progress="runs", panels=(OUTPUT, INPUT), has_page=True)
def noise(call: Call) -> None:
    """Run a program with noise at its contractions; report accuracy or SNR over sigma.

    hespas-validate noise net.mlir --sigma-mac 0:1 --sigma-weight 0:0.3 --data test.npz
    """
    from hespas import api

    report = call.run(api.noise)
    call.write_json(report.to_json())
    call.write_html(report)
    report_diagnostics(report.diagnostics, report.program)
    if not is_quiet():
        emit(report.table().to_text())
        emit(report.sites_table().to_text())
    emit(report.headline())
