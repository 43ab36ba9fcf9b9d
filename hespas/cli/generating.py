"""What the commands of ``hespas generate`` share: where a workload goes, what is told of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hespas.api.parts import Parts
from hespas.cli import options
from hespas.cli.session import check_reports, command_line, emit, progress_bar, say_diagnostics
from hespas.cli.text import bytes_text, count_text, flops_text, step_lines, table_text
from hespas.generators.spec import Generator
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import GenerationResult

__all__ = ["Asked", "making"]

_System = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Simulate the step on this system too.",
        autocompletion=options.system_names,
        rich_help_panel=options.DEVICE,
    ),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what it would be: nodes, bytes, FLOPs, memory.")
]
_Hardware = Annotated[
    str, options.hardware_option("Simulate the step on this device too, and compare its memory.")
]


@dataclass(frozen=True, slots=True)
class _Output:
    """Where a generated workload goes, and what is told of it."""

    out: Path | None
    to: str
    dry_run: bool
    hardware: str
    system: str
    json_file: Path | None
    parts: tuple[str, str, bool, bool]
    jobs: int
    overwrite: bool
    progress: bool | None
    debug: bool

    def make(self, generator: Generator, diagnostics: Diagnostics) -> None:
        """Generate, write and tell."""
        from hespas import api

        if (self.out is None) == (not self.dry_run):
            raise UsageError(
                "--out DST writes the workload, --dry-run only says what it would be", hint="give one"
            )
        form = options.workload_format(self.out, self.to)
        check_reports(
            {"--json": self.json_file}, {"--out": [self.out] if self.out else []}, overwrite=self.overwrite
        )
        with progress_bar("writing", self.progress) as callback:
            done = api.generate(
                generator,
                self.out,
                format=form,
                overwrite=self.overwrite,
                options=self._parts().options(jobs=self.jobs, progress=callback),
                measure=self.dry_run,
                hardware=self.hardware or None,
                system=self.system or None,
                diagnostics=diagnostics,
            )
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
        say_diagnostics(diagnostics, generator.name)
        _tell(done)

    def _parts(self) -> Parts:
        shard, cluster, only_classes, resume = self.parts
        return options.parts_of(shard, cluster, only_classes=only_classes, resume=resume)


def _output(
    out: options.Destination = None,
    to: options.DestinationFormat = "",
    dry_run: _DryRun = False,
    hardware: _Hardware = "",
    system: _System = "",
    jobs: options.Jobs = 2,
    only_classes: options.OnlyClasses = False,
    shard: options.Shard = "",
    resume: options.Resume = False,
    cluster: options.Cluster = "",
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    untrusted: options.Untrusted = False,
    limit: options.UntrustedLimit = None,
    debug: options.Debug = False,
) -> _Output:
    """The options of every command, and their defaults."""
    parts = (shard, cluster, only_classes, resume)
    return _Output(out, to, dry_run, hardware, system, json_file, parts, jobs, overwrite, progress, debug)


def _beside(call: typer.Context, loudness: options.Loudness = None) -> None:
    """What every command is given beside them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a command was called: its options as they were ``given``, by name, each with its spelling."""

    given: dict[str, str]
    diagnostics: Diagnostics

    def has_no_effect(self, name: str, why: str) -> None:
        """Tell, where an option is given, that the step is the same without it."""
        if name in self.given:
            self.diagnostics.warning("generate.no-effect", self.given[name], f"has no effect: {why}")


def _given_options(call: typer.Context) -> dict[str, str]:
    """The options that stand on the command line, by name: ``sequence_parallel``, as
    ``--no-sequence-parallel`` where that is what stands there.
    """
    found: dict[str, str] = {}
    for parameter in call.command.params:
        name = parameter.name or ""
        source = call.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            off = call.params.get(name) is False and parameter.secondary_opts
            found[name] = (parameter.secondary_opts if off else parameter.opts)[0]
    return found


_Settings = Callable[..., Generator | None]
"""From what was asked and the values of a command's own options."""


def making(*reads: str) -> Callable[[_Settings], Callable[..., None]]:
    """Make a command of a function from settings to a generator (None: everything is said already): it has
    the options of output too, writes or tells what is generated, and ends as commands do. ``reads`` are the
    settings that name files.
    """

    def decorated(function: _Settings) -> Callable[..., None]:
        own = _parameters(function)[1:]
        beside = _parameters(_beside)
        shared = _parameters(_output)
        mine = {each.name for each in own}
        names = {each.name for each in shared}

        def command(call: typer.Context, **values: Any) -> None:
            output = _output(**{name: value for name, value in values.items() if name in names})
            named = [str(values[name]) for name in reads]
            asked = Asked(_given_options(call), Diagnostics())
            with command_line(
                output.debug, asked.diagnostics, next(filter(None, named), ""),
                documents=[output.json_file], reads=named, writes=[output.out],
            ):  # fmt: skip
                _check_read(asked.given, output)
                settings: Any = {name: value for name, value in values.items() if name in mine}
                generator = function(asked, **settings)
                if generator is not None:
                    output.make(generator, asked.diagnostics)

        every = [*beside[:1], *own, *shared, *beside[1:]]
        vars(command)["__signature__"] = inspect.Signature(
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in every]
        )
        command.__annotations__ = {each.name: each.annotation for each in every}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorated


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


_OF_WRITING = ("to", "only_classes", "shard", "resume", "cluster")
"""Options that say what is written; ``jobs`` only says how fast."""


def _check_read(given: dict[str, str], output: _Output) -> None:
    """Raise ``UsageError`` for options of writing where nothing is written."""
    unread = [given[name] for name in _OF_WRITING if name in given]
    if output.dry_run and output.out is None and unread:
        raise UsageError(
            f"{', '.join(unread)}: a dry run writes nothing",
            code="dry-run-writes-nothing",
            hint=f"leave {'it' if len(unread) == 1 else 'them'} out, or name --out DST in place of --dry-run",
        )


def _capacity_text(done: GenerationResult) -> str:
    """Return the memory of the device, and whether that of the fullest rank fits it."""
    fits = {True: "fits", False: "does not fit", None: "cannot tell whether it fits"}[done.fits]
    return f"{bytes_text(done.capacity_bytes) or 'unknown'}: {fits}"


def _tell(done: GenerationResult) -> None:
    account = done.account
    where = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
    emit(f"{done.headline()}{where}")
    if done.step is not None:
        emit(step_lines(done.step, done.step.where))
    rows = [
        ("nodes of a rank, at most", count_text(done.nodes_per_rank_max)),
        ("traces of all ranks", bytes_text(done.et_bytes) if not done.written else ""),
        ("parameters", count_text(account.parameters)),
        ("model FLOPs of a step", flops_text(account.model_flops_per_step)),
        ("hardware FLOPs of a step", flops_text(account.hardware_flops_per_step)),
        ("collective payload of a rank", bytes_text(done.collective_bytes_per_rank)),
        ("peak memory of a rank", bytes_text(account.peak_memory_bytes)),
        (f"memory of {done.hardware}", _capacity_text(done) if done.hardware else ""),
    ]
    emit(table_text(("figure", "value"), [row for row in rows if row[1]], left=(0,)))
    if account.memory:
        shares = [(each.what, bytes_text(each.size_bytes)) for each in account.memory]
        emit(table_text(("memory of the fullest rank", "size"), shares, left=(0,)))
