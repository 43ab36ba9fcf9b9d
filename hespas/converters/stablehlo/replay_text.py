"""The module around a replay: header, arguments, results, and what was not kept, for readers of the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hespas.converters.stablehlo.replay import Replayed, quoted_text
from hespas.converters.stablehlo.sniffing import CLASS_MARK

__all__ = ["Origin", "Share", "module_text"]


class Origin(NamedTuple):
    """The graph that is replayed: its name, the format it came from, and how many operations it has."""

    name: str
    format: str
    operations: int


class Share(NamedTuple):
    """The rank class of a program that is one of ``classes``; ``ranks`` as :mod:`.ranks` writes them."""

    number: int
    classes: int
    ranks: str


def module_text(replayed: Replayed, origin: Origin, not_kept: Sequence[str], share: Share | None) -> str:
    """The program as text. ``hespas.replay`` marks it; ``not_kept`` are lines like ``durations: 12``."""
    emitter = replayed.emitter
    aliases = [f"{alias} = {attribute}" for attribute, alias in emitter.aliases.items()]
    arguments = ", ".join(f"%arg{place}: {tensor}" for place, tensor in enumerate(emitter.arguments))
    kinds = ", ".join(str(value.type) for value in replayed.outputs)
    listed = ", ".join(quoted_text(line) for line in not_kept)
    ranks = f"ranks = {quoted_text(share.ranks)}, " if share else ""
    marks = (
        f"hespas.replay = {{flops = {replayed.flops!r} : f64, not_kept = [{listed}], "
        f"operations = {origin.operations} : i64, {ranks}source = {quoted_text(origin.format)}}}"
    )
    attributes = f"{marks}, mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replayed.num_ranks} : i32"
    names = ", ".join(str(value) for value in replayed.outputs)
    ends = f"return {names} : {kinds}" if names else "return"
    lines = [
        "// A replay: the work of a graph in its order, not the program that the graph was taken from.",
        *([f"{CLASS_MARK} {share.number} of {share.classes}"] if share else []),
        *aliases,
        f"module @{quoted_text(origin.name or 'replay')} attributes {{{attributes}}} {{",
        f"  func.func public @main({arguments}) -> ({kinds}) {{",
        "    %zero = stablehlo.constant dense<0> : tensor<i32>",
        *emitter.lines,
        f"    {ends}",
        "  }",
        "}",
        "",
    ]
    return "\n".join(lines)
