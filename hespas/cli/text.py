"""Figures and tables for people."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from math import isfinite, isnan, nan
from textwrap import wrap
from typing import TYPE_CHECKING

from hespas.graph.errors import clipped

if TYPE_CHECKING:
    from hespas.graph import Workload
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
    "plain_text",
    "ranks_text",
    "step_lines",
    "step_text",
    "table_text",
    "time_text",
]

WIDTH = 100
"""Characters of a line of a table, where its figures leave room for that."""
_LEAST_WIDTH = 25


_LONGEST = 1e15
"""Figures from here on are told in powers of ten."""


_SAME_NAME = (
    "against allow_programs alone args astra_bin astra_timeout backend batch beside cache "
    "cache_tokens calibrate capacity capture classes cluster comm_groups compile_for compiled context "
    "context_all_to_all cp default_dtype devices dp drafts ep estimator etp expert_node explicit "
    "factors framework global_batch granularity grid hardware imbalance limit lora_rank "
    "max_batched_tokens max_e2e max_input_bytes max_mape max_regression measured memory_config mesh "
    "micro_batch min_coverage missing mode model_flops network_config num_devices num_replicas "
    "only_classes out overlap overwrite page partitioner platform pp precision profile prompt "
    "queues_per_dim ranks real_tensors recompute recorded recover report requests rescale resume "
    "ring_attention run_time_unit schedule seq sequence_parallel shard split system system_config "
    "table test_by timeline timeout tokens tp untrusted vp workload zero"
)
_FLAGS: Mapping[str, str] = {name: "--" + name.replace("_", "-") for name in _SAME_NAME.split()} | {
    "broken": "--break",
    "dims": "--dim",
    "others": "--with",
    "source_format": "--from",
    "source_version": "--from-version",
    "target_format": "--to",
    "target_version": "--to-version",
}
"""The name of an argument of the interface -> the option of the commands."""

_ARGUMENT = re.compile(r"`([a-z_0-9]+)(?:=([^`]*))?`")


def flagged(text: str) -> str:
    """A message of the library, which names arguments (```num_devices=8```), with the options of a command
    (``--num-devices 8``) in their places.
    """

    def option(found: re.Match[str]) -> str:
        flag = _FLAGS.get(found[1])
        return found[0] if flag is None else flag if found[2] is None else f"{flag} {found[2]}"

    return _ARGUMENT.sub(option, text)


_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _scaled(value: float, units: Sequence[str], step: float) -> str:
    if isnan(value):
        return "unknown"
    index = 0
    while abs(value) >= step and index < len(units) - 1:
        value /= step
        index += 1
    if abs(value) >= _LONGEST:
        return f"{_huge(value)} {units[index]}"
    digits = f"{value:,.0f}" if index == 0 and value == int(value) else f"{value:,.3f}"
    return f"{digits} {units[index]}"


def _huge(value: float) -> str:
    """A figure past all prefixes, or infinity."""
    if isfinite(value):
        return f"{value:.3e}"
    return "infinite" if value > 0 else "-infinite"


def flops_text(flops: float) -> str:
    """Floating-point operations with a decimal prefix."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"), 1000)


def bytes_text(count: float) -> str:
    """Bytes with a decimal prefix."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), 1000)


def energy_text(energy_j: float) -> str:
    """An energy with the unit that suits it."""
    return _scaled(energy_j * 1e9, ("nJ", "uJ", "mJ", "J", "kJ", "MJ"), 1000)


def time_text(duration_ns: float) -> str:
    """A duration with the unit that suits it."""
    return _scaled(duration_ns, ("ns", "us", "ms", "s"), 1000)


def step_text(done: Simulation, hardware: str, *, mode: str = "hespas") -> str:
    """The answer in a line: the time of a step, its 90 % interval, where and of how many ranks. In ``mode``
    astra computation alone is as recorded.
    """
    here = sum(found.num_ranks for found in done.classes)
    nothing = done.is_lower_bound and not done.step_ns
    least = "at least " if done.is_lower_bound and not nothing else ""
    time = time_text(nan if nothing else done.step_ns)
    estimated = bool(hardware) or mode == "astra"
    span = f"{time} per step" if nothing else _span_words(done.workload, time, estimated=estimated)
    return (
        f"{least}{span}"
        f"{_interval_text(done, hardware, mode)}, {ranks_text(here, len(done.timeline.finish_ns))} "
        f"in {counted(len(done.classes), 'class')}"
    )


def _span_words(workload: Workload, time: str, *, estimated: bool) -> str:
    """A step's time; of a recording, whose steps are one span, that and the time of a step."""
    from hespas.api.recorded_steps import recorded_step_of
    from hespas.converters.measured_ops import recording_text

    recorded = recorded_step_of(workload, estimated=estimated)
    if recorded is None:
        return f"{time} per step"
    if not recorded.count:
        return f"span {time}"
    period = "" if isnan(recorded.period_ns) else time_text(recorded.period_ns)
    steps = recording_text(recorded.count, period)
    if isnan(recorded.step_ns):
        return f"span {time} of {steps}"
    return f"{time_text(recorded.step_ns)} per step ({steps}, span {time})"


def step_lines(done: Simulation, hardware: str, *, mode: str = "hespas") -> list[str]:
    """Return the summary of a step: its line, and one of its rates where they are known."""
    rates = [str(done.throughput)] if done.throughput.is_known else []
    return [step_text(done, hardware, mode=mode), *rates]


def mixed_lines(done: Simulation) -> list[str]:
    """Return a line on a workload of recorded and estimated times; nothing for another workload."""
    if not done.is_mixed:
        return []
    kept = counted(sum(found.kept for found in done.classes), "operation")
    device = clipped(done.workload.metadata.get("device", "")) or "an unknown device"
    return [f"mixed: {kept} with times recorded on {device}, the others estimated"]


def _interval_text(done: Simulation, hardware: str, mode: str) -> str:
    if not hardware:
        words = _recorded_text(done.workload)
        return words if mode == "hespas" or not words else f", computation{words}"
    if isnan(done.low_ns):
        return f" on {hardware} (no interval: its estimators give none)"
    return f" on {hardware} (90 % interval: {time_text(done.low_ns)} to {time_text(done.high_ns)})"


def _recorded_text(workload: Workload) -> str:
    """Where times were recorded that nobody estimated; empty where the input does not say."""
    device = workload.metadata.get("device", "")
    return f" as recorded on {clipped(device)}" if device else ""


def count_text(count: float) -> str:
    """A count with thousands separators; a fraction only where there is one."""
    if isnan(count):
        return "unknown"
    if abs(count) >= _LONGEST:
        return _huge(count)
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def counted(count: float, noun: str, plural: str = "") -> str:
    """``1 rank``, ``4 ranks``, ``2 classes``; ``plural`` is the last word where it is irregular."""
    if count == 1:
        return f"1 {noun}"
    if plural:
        return f"{count_text(count)} {' '.join((*noun.split()[:-1], plural))}"
    return f"{count_text(count)} {noun}{'es' if noun.endswith('s') else 's'}"


def ranks_text(here: int, job: int) -> str:
    """``4 ranks``; ``1 of 8 ranks`` where the others of the job were not read."""
    return counted(job, "rank") if here == job else f"{count_text(here)} of {counted(job, 'rank')}"


def plain_text(text: str) -> str:
    """A text as one line: what could end it, steer a terminal, or has no encoding, as JSON escapes it."""
    if text.isprintable():
        return text
    # Each character is looked at once, however often it stands in megabytes of text.
    return text.translate({ord(each): _escaped(each) for each in set(text) if not each.isprintable()})


def _escaped(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[place : place + 4]}" for place in range(0, len(code), 4))


def table_text(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> list[str]:
    """The lines of an aligned plain-text table: columns ``left`` to the left, the others (figures) to the
    right. Lines have at most :data:`WIDTH` characters where that can be: the widest columns of words are
    broken at blanks.
    """
    shown = [[plain_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    words = [column for column in left if column]
    while words and (excess := sum(widths) + 2 * len(widths) - 2 - WIDTH) > 0:
        widest = max(words, key=widths.__getitem__)
        words.remove(widest)
        widths[widest] = max(widths[widest] - excess, min(widths[widest], _LEAST_WIDTH))
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
