"""The module around a replay: header, arguments, results, and what was not kept, for readers of the file."""

from __future__ import annotations

from collections.abc import Sequence

from hespas.converters.stablehlo.replay import Replayed, quoted_text

__all__ = ["module_text"]


def module_text(replayed: Replayed, name: str, source: str, nodes: int, not_kept: Sequence[str]) -> str:
    """The program as text. ``hespas.replay`` marks it; ``not_kept`` are lines like ``durations: 12``."""
    emitter = replayed.emitter
    aliases = [f"{alias} = {attribute}" for attribute, alias in emitter.aliases.items()]
    arguments = ", ".join(f"%arg{place}: {tensor}" for place, tensor in enumerate(emitter.arguments))
    kinds = ", ".join(str(value.type) for value in replayed.outputs)
    listed = ", ".join(quoted_text(line) for line in not_kept)
    marks = (
        f"hespas.replay = {{flops = {replayed.flops!r} : f64, not_kept = [{listed}], "
        f"operations = {nodes} : i64, source = {quoted_text(source)}}}"
    )
    attributes = f"{marks}, mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {replayed.num_ranks} : i32"
    names = ", ".join(str(value) for value in replayed.outputs)
    ends = f"return {names} : {kinds}" if names else "return"
    lines = [
        "// A replay: the work of a graph in its order, not the program that the graph was taken from.",
        *aliases,
        f"module @{quoted_text(name or 'replay')} attributes {{{attributes}}} {{",
        f"  func.func public @main({arguments}) -> ({kinds}) {{",
        "    %zero = stablehlo.constant dense<0> : tensor<i32>",
        *emitter.lines,
        f"    {ends}",
        "  }",
        "}",
        "",
    ]
    return "\n".join(lines)
