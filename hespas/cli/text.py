"""Formatting of quantities and tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from math import isfinite, isnan, nan
from textwrap import wrap
from typing import TYPE_CHECKING

from hespas.graph.errors import clipped

if TYPE_CHECKING:
    from hespas.simulator import Simulation

__all__ = [
    "WIDTH",
    "bytes_text",
    "count_text",
    "counted",
    "energy_text",
    "flagged",
    "flops_text",
    "mixed_lines",
    "op_class_text",
    "plain_text",
    "ranks_text",
    "step_lines",
    "step_text",
    "table_text",
    "time_text",
]

WIDTH = 100
"""Target width of a table in characters; tables with many figures may be wider."""
_MIN_WIDTH = 25
_MAX_DECIMAL = 1e15
"""Figures from here on are written with an exponent."""
_SAME_NAME = (
    "allow_programs alone args astra_bin astra_timeout backend baseline batch block_size "
    "calibrate capacity capture classes cluster comm_groups compile_for compiled context "
    "context_all_to_all cp default_dtype devices dp engine ep estimator etp expert_dtype expert_node "
    "explicit factors framework global_batch gpu_memory_utilization granularity grid hardware imbalance "
    "kv_cache_dtype kv_cache_tokens limit lora_rank max_batched_tokens max_e2e max_input_bytes max_mape "
    "max_num_seqs max_regression memory_config mesh micro_batch min_coverage mode model_flops "
    "network_config num_devices num_replicas num_speculative_tokens only_classes out overlap overlay "
    "overwrite partitioner per_request platform pp precision profile prompt queues_per_dim ranks "
    "real_tensors recompute recorded recover report request_overhead_ms requests rescale resume "
    "ring_attention run_time_unit schedule seq sequence_parallel shard split step_overhead_us system "
    "system_config table test_by timeline timeout tokens tp untrusted vp workload zero"
)
_FLAGS: Mapping[str, str] = {name: "--" + name.replace("_", "-") for name in _SAME_NAME.split()} | {
    "broken": "--break",
    "dims": "--dim",
    "drafts": "--num-speculative-tokens",
    "on_unknown": "--missing",
    "others": "--with",
    "page": "--block-size",
    "profiles": "--measured",
    "source_format": "--from",
    "source_version": "--from-version",
    "style": "--framework",
    "target_format": "--to",
    "target_version": "--to-version",
}
"""Argument of the Python interface -> option of the command line."""

_ARGUMENT = re.compile(r"`([a-z_0-9]+)(?:=([^`]*))?`")


def flagged(text: str) -> str:
    """Replace Python arguments in a message of the library (```num_devices=8```) by options of the command
    line (``--num-devices 8``).
    """

    def option(argument: re.Match[str]) -> str:
        flag = _FLAGS.get(argument[1])
        return argument[0] if flag is None else flag if argument[2] is None else f"{flag} {argument[2]}"

    return _ARGUMENT.sub(option, text)


def _scaled(value: float, units: Sequence[str], step: float) -> str:
    if isnan(value):
        return "unknown"
    index = 0
    while abs(value) >= step and index < len(units) - 1:
        value /= step
        index += 1
    if abs(value) >= _MAX_DECIMAL:
        return f"{_exponent_text(value)} {units[index]}"
    digits = f"{value:,.0f}" if index == 0 and value == int(value) else f"{value:,.3f}"
    return f"{digits} {units[index]}"


def _exponent_text(value: float) -> str:
    """Format a figure beyond all prefixes, or infinity."""
    if isfinite(value):
        return f"{value:.3e}"
    return "infinite" if value > 0 else "-infinite"


def flops_text(flops: float) -> str:
    """Format floating-point operations with a decimal prefix."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"), 1000)


def bytes_text(count: float) -> str:
    """Format bytes with a decimal prefix."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), 1000)


def energy_text(energy_j: float) -> str:
    """Format an energy with a fitting unit."""
    return _scaled(energy_j * 1e9, ("nJ", "uJ", "mJ", "J", "kJ", "MJ"), 1000)


def time_text(duration_ns: float) -> str:
    """Format a duration with a fitting unit."""
    return _scaled(duration_ns, ("ns", "us", "ms", "s"), 1000)


def step_text(done: Simulation, hardware: str, *, mode: str = "hespas") -> str:
    """Return the summary line of a step: its time, 90 % interval, device and number of ranks.

    In ``mode`` astra, only computation times are recorded ones.
    """
    from hespas.api.simulation_result import recorded_step_of
    from hespas.converters.measured_ops.steps import recording_text

    has_time = bool(done.step_ns) or not done.is_lower_bound
    time = time_text(done.step_ns if has_time else nan)
    span = f"{time} per step"
    recorded = recorded_step_of(done.workload, estimated=bool(hardware) or mode == "astra")
    if has_time and recorded is not None:  # a recording without step marks has only one span
        span = f"span {time}"
        if recorded.count:
            period = "" if isnan(recorded.period_ns) else time_text(recorded.period_ns)
            steps = recording_text(recorded.count, period)
            if isnan(recorded.step_ns):
                span = f"span {time} of {steps}"
            else:
                span = f"{time_text(recorded.step_ns)} per step ({steps}, span {time})"
    at_least = "at least " if done.is_lower_bound and has_time else ""
    num_ranks = ranks_text(sum(entry.num_ranks for entry in done.classes), len(done.timeline.finish_ns))
    source = _duration_source(done, hardware, mode)
    return f"{at_least}{span}{source}, {num_ranks} in {counted(len(done.classes), 'class')}"


def _duration_source(done: Simulation, hardware: str, mode: str) -> str:
    """Return the device of estimated durations with their interval, or the device of recorded ones."""
    if not hardware:
        device = done.workload.metadata.get("device", "")
        if not device:
            return ""
        return f"{', computation' if mode != 'hespas' else ''} as recorded on {clipped(device)}"
    low_ns, high_ns = done.interval_ns
    if isnan(low_ns):
        return f" on {hardware} (no interval: its estimators give none)"
    return f" on {hardware} (90 % interval: {time_text(low_ns)} to {time_text(high_ns)})"


def step_lines(done: Simulation, hardware: str, *, mode: str = "hespas") -> list[str]:
    """Return the summary line of a step, and a line with its throughput if that is known."""
    rates = [str(done.throughput)] if done.throughput.is_known else []
    return [step_text(done, hardware, mode=mode), *rates]


def mixed_lines(done: Simulation) -> list[str]:
    """Return a line about a workload that mixes recorded and estimated durations; else no line."""
    if not done.mixes_recorded_and_estimated:
        return []
    recorded = counted(sum(entry.kept for entry in done.classes), "operation")
    device = clipped(done.workload.metadata.get("device", "")) or "an unknown device"
    return [f"mixed: {recorded} with durations recorded on {device}, the others estimated"]


def op_class_text(name: str) -> str:
    """Return an operation class as tables show it; JSON documents and files keep the name of the graph."""
    return {"contraction": "matmul", "move": "copy", "generate": "init", "free": "zero-cost"}.get(name, name)


def count_text(count: float) -> str:
    """Format a count with thousands separators, and one decimal if it is fractional."""
    if isnan(count):
        return "unknown"
    if abs(count) >= _MAX_DECIMAL:
        return _exponent_text(count)
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def counted(count: float, noun: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 rank``, ``2 classes``. ``plural`` is the last word if irregular."""
    if count == 1:
        return f"1 {noun}"
    if plural:
        return f"{count_text(count)} {' '.join((*noun.split()[:-1], plural))}"
    return f"{count_text(count)} {noun}{'es' if noun.endswith('s') else 's'}"


def ranks_text(available: int, total: int) -> str:
    """Format a number of ranks: ``4 ranks``, or ``1 of 8 ranks`` if the input holds only some of the job."""
    return (
        counted(total, "rank")
        if available == total
        else f"{count_text(available)} of {counted(total, 'rank')}"
    )


def plain_text(text: str) -> str:
    """Return a text as one line. Characters that break lines, control a terminal or cannot be encoded are
    escaped as in JSON.
    """
    if text.isprintable():
        return text

    def escaped(character: str) -> str:
        short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
        if short is not None:
            return short
        code = character.encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{code[start : start + 4]}" for start in range(0, len(code), 4))

    # translate() escapes each distinct character once, also in megabytes of text.
    return text.translate({ord(char): escaped(char) for char in set(text) if not char.isprintable()})


def table_text(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> list[str]:
    """Return the lines of a plain-text table. Columns ``left`` are aligned left, the others right.

    The widest text columns are wrapped at blanks, so that lines fit :data:`WIDTH` characters if possible.
    """
    shown = [[plain_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    words = [column for column in left if column]
    while words and (excess := sum(widths) + 2 * len(widths) - 2 - WIDTH) > 0:
        widest = max(words, key=widths.__getitem__)
        words.remove(widest)
        widths[widest] = max(widths[widest] - excess, min(widths[widest], _MIN_WIDTH))
    lines: list[str] = []
    for row in shown:
        broken = [
            [cell] if len(cell) <= width else wrap(cell, width)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*broken, fillvalue=""):
            cells = [
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
    return lines
