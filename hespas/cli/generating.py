"""Common part of the ``hespas generate`` commands: their output options, and how a command is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from hespas.api.generation import generate
from hespas.cli.command import Call, command
from hespas.cli.destinations import workload_format
from hespas.cli.terminal import emit, report_diagnostics, step_lines
from hespas.generators.spec import Generator
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import bytes_text, count_text, flops_text

__all__ = ["GivenOptions", "generator_command"]

_WRITE_OPTIONS = ("format", "only_classes", "shard", "resume", "cluster")
"""Parameters that have an effect on written files only."""


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """Options of ``hespas generate`` that the user typed: ``spellings`` has their flags by parameter name."""

    spellings: dict[str, str]
    diagnostics: Diagnostics

    def warn_no_effect(self, name: str, reason: str) -> None:
        """Warn, if an option is given, that it does not change the step."""
        if name in self.spellings:
            self.diagnostics.warning("generate.no-effect", self.spellings[name], f"has no effect: {reason}")


_SettingsFunction = Callable[..., Generator | None]
"""Function from the given options and a command's own parameters to a generator."""


def generator_command(function: _SettingsFunction) -> Callable[..., None]:
    """Make a command of a function from settings to a generator.

    The command has the output options too, and writes or prints the generated workload. A function that
    returns None has printed its own result.
    """

    @wraps(function)
    def handler(call: Call, **settings: Any) -> None:
        spellings: dict[str, str] = {}
        for parameter in call.context.command.params:
            name = parameter.name or ""
            if call.is_written(name):
                is_off = call.context.params.get(name) is False and parameter.secondary_opts
                spellings[name] = (parameter.secondary_opts if is_off else parameter.opts)[0]
        unused = [spellings[name] for name in _WRITE_OPTIONS if name in spellings]
        if call["measure"] and call["destination"] is None and unused:
            raise UsageError(
                f"{', '.join(unused)}: not available with --dry-run, which writes nothing",
                code="dry-run-writes-nothing",
                hint="leave it out, or replace --dry-run by --out DST",
            )
        generator = function(GivenOptions(spellings, call.diagnostics), **settings)
        if generator is not None:
            _generate(call, generator)

    make = command(generate, progress="writing", without=("max_input_bytes",), own_first=True)
    return make(handler)


def _generate(call: Call, generator: Generator) -> None:
    """Generate, simulate and write the workload, then print its figures."""
    from hespas import api

    if call["destination"] is None and not call["measure"]:
        raise UsageError("either --out DST or --dry-run is required", hint="give one of them")
    if call["destination"] is not None and call["measure"]:
        raise UsageError("--out and --dry-run exclude each other", hint="give one of them")
    target_format = workload_format(call["destination"], call["format"])
    done = call.run(api.generate, generator=generator, format=target_format)
    call.write_json(done.to_json())
    report_diagnostics(call.diagnostics, generator.name)
    account = done.account
    written = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
    emit(f"{done.headline()}{written}")
    if done.step is not None:
        emit(step_lines(done.step, done.step.where))
    fits = {True: "fits", False: "does not fit", None: "cannot tell whether it fits"}[done.fits]
    capacity = f"{bytes_text(done.capacity_bytes) or 'unknown'}: {fits}" if done.hardware else ""
    rows = [
        ("maximum nodes per rank", count_text(done.nodes_per_rank_max)),
        ("traces of all ranks", bytes_text(done.et_bytes) if not done.written else ""),
        ("parameters", count_text(account.parameters)),
        ("model FLOPs per step", flops_text(account.model_flops_per_step)),
        ("hardware FLOPs per step", flops_text(account.hardware_flops_per_step)),
        ("collective payload per rank", bytes_text(done.collective_bytes_per_rank)),
        ("peak memory per rank", bytes_text(account.peak_memory_bytes)),
        (f"memory of {done.hardware}", capacity),
    ]
    header = (Column("figure"), *columns("number", "value", write=str))
    emit(table_from_rows(header, [row for row in rows if row[1]]).to_text())
    if account.memory:
        emit(done.table().select({"what": "memory of the fullest rank", "size_bytes": "size"}).to_text())
