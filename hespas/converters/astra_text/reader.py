"""A text workload of ASTRA-sim 1.0 to one step of a job whose ranks all run the same."""

from __future__ import annotations

from pathlib import Path

from hespas.converters.astra_text.emit import CYCLE_NS, Emitter
from hespas.converters.astra_text.grammar import TextWorkload, parse
from hespas.converters.astra_text.groups import Groups
from hespas.converters.astra_text.policies import Policy
from hespas.converters.astra_text.schedule import add_step
from hespas.converters.format import ReadOptions
from hespas.files.limits import limits
from hespas.files.source import read_bytes
from hespas.graph import Diagnostics, GraphBuilder, Workload
from hespas.graph.errors import FormatError

__all__ = ["read_astra_text"]


def read_astra_text(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read a file; ``options.num_devices`` states the number of ranks, which the format does not.

    Times are in ns, a cycle being one. Groups that depend on the network are left unknown (all ranks) and
    reported. Raises :class:`FormatError`, :class:`UnsupportedError` and :class:`UsageError`.
    """
    data = read_bytes(path, min(options.max_bytes, limits().text_workload_bytes))
    try:
        text = parse(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise FormatError(
            "the file is no UTF-8 text",
            path=str(path),
            position=f"byte {error.start}",
            hint="is this a workload of ASTRA-sim 1.0?",
        ) from error
    groups = Groups.of(text, options.num_devices, str(path))
    name = path.name.removesuffix(".gz").removesuffix(".txt")
    emitter = Emitter(GraphBuilder(name), groups, path.name if options.locations else "")
    add_step(text, emitter)
    _report(text, emitter, str(path), diagnostics)
    metadata = {"format": "astra-text", "parallelism": text.policy.value}
    if text.model_ranks > 0:
        metadata["model_parallel_npu_group"] = str(text.model_ranks)
    return Workload.spmd(emitter.builder.build(), groups.num_ranks, metadata)


def _report(text: TextWorkload, emitter: Emitter, path: str, diagnostics: Diagnostics) -> None:
    """Say what was assumed and what is not in the graph."""

    def warn(code: str, message: str, count: int) -> None:
        diagnostics.warning(f"astra-text.{code}", path, message, path=path, count=count)

    def note(code: str, message: str, count: int) -> None:
        diagnostics.info(f"astra-text.{code}", path, message, path=path, count=count)

    ranks = f"taken as {emitter.groups.num_ranks:,}: state it with --num-devices"
    warn("ranks", f"the file does not say how many ranks run it; {ranks}", not emitter.groups.is_stated)
    network = "the file does not describe the network whose dimensions collectives run over"
    warn("network-groups", f"{network}; they are taken as over all ranks", emitter.unknown)
    warn("trailing-text", "words stand behind the last layer and were not read", text.rest)
    note("cycles", f"layers state times in cycles, taken as {CYCLE_NS:g} ns each", len(text.layers))
    note("not-run", "collectives are stated that the policy never runs", emitter.not_run)
    phases = (
        phase for layer in text.layers for phase in (layer.forward, layer.input_grad, layer.weight_grad)
    )
    idle = sum(phase.cycles > 0 for phase in phases) - emitter.computed
    note("not-computed", "times are stated of phases that the policy never computes", idle)
    note("no-transfer", "collectives of one rank or of no bytes are left out", emitter.left_out)
    reserved = sum(layer.reserved != -1 for layer in text.layers)
    note("reserved", "layers use the reserved column, which nothing reads", reserved)
    others = len(text.layers) - 1 if text.policy is Policy.MICRO else 0
    note("micro", "layers behind the first are never run by a MICRO workload", others)
