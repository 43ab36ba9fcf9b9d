"""``hespas generate``: synthetic workloads of models, collectives and random programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hespas.api.generation import generate
from hespas.api.generators import (
    collective_benchmark,
    dit_step,
    dlrm_step,
    eager_step,
    llm_step,
    random_job,
    vit_step,
)
from hespas.api.synthesis import synthesize
from hespas.cli.command import Call, command
from hespas.cli.destinations import workload_format
from hespas.cli.entry import renamed_options
from hespas.cli.terminal import emit, report_diagnostics, step_lines
from hespas.generators.spec import Generator
from hespas.graph.errors import UsageError
from hespas.graph.hints import Option, options_of
from hespas.report.tables import Column, columns, table_from_rows
from hespas.report.texts import bytes_text

__all__ = ["app", "collectives", "dit", "dlrm", "eager", "llm", "random", "synth", "vit"]

app = typer.Typer(
    no_args_is_help=True,
    help="Generate workloads from settings: models at any parallelism, collectives, random jobs.",
)

_MAX_ROW_DIGITS = 9
_WRITE_OPTIONS = ("format", "only_classes", "shard", "resume", "cluster")
"""Parameters that have an effect on written files only."""
_Handler = Callable[..., None]


def _generator_command(settings: Callable[..., object]) -> Callable[[_Handler], _Handler]:
    """Return a decorator that makes a command. Its options are the options of the function ``settings``,
    which returns a generator, and of :func:`hespas.api.generate`.
    """
    return command(settings, generate, progress="writing", without=("max_input_bytes",), has_page=True)


_Row = Annotated[
    str,
    Option(
        "Read all settings from row N (from 0) of a table of runs.", metavar="TABLE.csv:N", access="reads"
    ),
]
_List = Annotated[bool, Option("List built-in models and exit.", flag="list")]


@_generator_command(llm_step)
def llm(call: Call, *, row: _Row = "", list_models: _List = False) -> None:
    """Generate a training or serving step of an LLM on any number of ranks.

    hespas generate llm llama-3-70b --dp 4 --tp 8 --pp 4 --global-batch 64 --out traces/

    hespas generate llm llama-3-8b --dp 256 --fsdp --dry-run

    hespas generate llm deepseek-v3 --phase decode --dp 32 --ep 32 --batch 64 --context 4096 --out step.json
    """
    settings = options_of(llm_step).keys() - {"model"}
    if list_models:
        others = settings | options_of(generate).keys() | {"json_file", "overwrite", "row", "model"}
        _refuse(call, others, "list-only", "not available with --list")
        from hespas.api import listings

        emit(listings.list_models().to_text())
        return
    if bool(call["model"]) == bool(row):
        raise UsageError(
            "either MODEL or --row is required", hint="list the models: hespas generate llm --list"
        )
    if not row:
        _generate(call, llm_step)
        return
    reason = "not available with --row, which reads all settings from the table"
    _refuse(call, settings, "row-says-all", reason)
    table, _, number = row.rpartition(":")
    if not table or not (number.isascii() and number.isdigit() and len(number) <= _MAX_ROW_DIGITS):
        raise UsageError(
            f"invalid --row {row}: expected TABLE.csv:N", hint="give --row runs.csv:0 for the first row"
        )
    from hespas.generators.llm import row_of

    _make(call, row_of(Path(table), int(number), call.diagnostics).step())


def _refuse(call: Call, names: set[str], code: str, reason: str) -> None:
    """Raise ``UsageError`` if the user wrote one of these options."""
    written = [call.spelling(name) for name in call.texts if name in names and call.is_written(name)]
    if written:
        others = f" (nor {', '.join(written[1:])})" if len(written) > 1 else ""
        raise UsageError(f"{written[0]}: {reason}{others}", code=code, hint="leave it out")


@_generator_command(dlrm_step)
def dlrm(call: Call) -> None:
    """Generate a training step of DLRM with embedding tables sharded over all ranks.

    hespas generate dlrm --ranks 16 --sharding row --out traces/
    """
    _generate(call, dlrm_step)


@_generator_command(vit_step)
def vit(call: Call) -> None:
    """Generate a training step of a vision transformer, ViT-B/16.

    hespas generate vit --dp 8 --batch 64 --fsdp --out traces/
    """
    _generate(call, vit_step)


@_generator_command(dit_step)
def dit(call: Call) -> None:
    """Generate a training step of a diffusion transformer, DiT-XL/2. Its image is the latent, 32 wide.

    hespas generate dit --dp 8 --batch 32 --fsdp --out traces/
    """
    _generate(call, dit_step)


@_generator_command(eager_step)
def eager(call: Call) -> None:
    """Generate a transformer on one device as PyTorch runs it eagerly in float32.

    hespas generate eager gpt2-large --batch 4 --seq 1024 --out gpt2.json
    """
    _generate(call, eager_step)


@_generator_command(collective_benchmark)
def collectives(call: Call) -> None:
    """Generate collectives and messages of every size, in sequence.

    hespas generate collectives --kinds all_reduce,ping_pong --sizes 1MiB-64MiB --ranks 8 --out traces/
    """
    _generate(call, collective_benchmark)


@_generator_command(random_job)
def random(call: Call) -> None:
    """Generate a random valid job, or one with a single violation for tests of validators.

    hespas generate random --ranks 8 --nodes 1000 --classes 4 --seed 1 --out traces/
    """
    _generate(call, random_job)


@command(synthesize, progress="generating", has_page=True)
def synth(call: Call) -> None:
    """Generate jobs that keep the statistics of given ones, with a card that compares both.

    hespas generate synth --like traces/ --count 10 --scale 2 --out jobs/

    hespas generate synth --like traces/ --nodes 100000 --no-simulate --out jobs/
    """
    done = call.run(synthesize)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(done.diagnostics, ", ".join(done.sources))
    written = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
    emit(f"{done.headline()}{written}")
    emit(done.table().to_text())
    emit(done.card_table().to_text())


def _generate(call: Call, settings: Callable[..., Generator]) -> None:
    """Make the generator of a command's settings and its workload, and print the figures."""
    _make(call, settings(**call.arguments(settings)))


def _make(call: Call, generator: Generator) -> None:
    """Generate, simulate and write the workload, then print its figures."""
    unused = [call.spelling(name) for name in _WRITE_OPTIONS if call.is_written(name)]
    if call["measure"] and call["destination"] is None and unused:
        raise UsageError(
            f"{', '.join(unused)}: not available with --dry-run, which writes nothing",
            code="dry-run-writes-nothing",
            hint="leave it out, or replace --dry-run by --out DST",
        )
    if call["destination"] is None and not call["measure"]:
        raise UsageError("either --out DST or --dry-run is required", hint="give one of them")
    if call["destination"] is not None and call["measure"]:
        raise UsageError("--out and --dry-run exclude each other", hint="give one of them")
    target_format = workload_format(call["destination"], call["format"])
    done = call.run(generate, generator=generator, format=target_format)
    call.write_json(done.to_json())
    call.write_html(done)
    report_diagnostics(call.diagnostics, generator.name)
    written = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
    emit(f"{done.headline()}{written}")
    if done.step is not None:
        emit(step_lines(done.step, done.step.where))
    header = (Column("figure"), *columns("number", "value", write=str))
    emit(table_from_rows(header, done.figures()).to_text())
    if done.account.memory:
        titles = {"what": "memory of the fullest rank", "size_bytes": "size", "counted_as": "counted as"}
        emit(done.table().select(titles).to_text())


_RENAMED = renamed_options(
    {
        "--drafts": "--num-speculative-tokens",
        "--page": "--block-size",
        "--style": "--framework",
        "--cache": "--kv-cache-dtype",
    }
)
app.command(cls=_RENAMED)(llm)
app.command()(dlrm)
app.command()(vit)
app.command()(dit)
app.command()(eager)
app.command()(collectives)
app.command()(random)
app.command()(synth)
