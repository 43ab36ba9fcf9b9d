"""Summary lines of steps, and names of options and classes, for the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isnan, nan
from typing import TYPE_CHECKING

from hespas.graph.errors import clipped
from hespas.report.texts import count_text, counted, time_text

if TYPE_CHECKING:
    from hespas.simulator import Simulation

__all__ = [
    "flagged",
    "mixed_lines",
    "op_class_text",
    "ranks_text",
    "step_lines",
    "step_text",
]

_SAME_NAME = (
    "allow_programs alone args array astra_bin astra_timeout backend baseline batch block_size "
    "calibrate capacity capture classes cluster comm_groups compile_for compiled context "
    "context_all_to_all cp dataflow default_dtype devices dp engine ep estimator etp expert_dtype "
    "expert_node explicit factors framework global_batch gpu_memory_utilization granularity grid "
    "hardware imbalance interference jitter kv_cache_dtype kv_cache_tokens launches limit lora_rank "
    "max_batched_tokens max_e2e max_input_bytes max_mape max_num_seqs max_regression memory_config "
    "mesh messages micro_batch min_coverage mode model_flops network_config num_devices num_replicas "
    "num_speculative_tokens only_classes out overlap overlap_trips overlay overwrite partitioner "
    "per_request platform pp precision profile prompt queues_per_dim ranks real_tensors recompute "
    "recorded recover report request_overhead_ms requests rescale resume ring_attention run_time_unit "
    "schedule seed seq sequence_parallel shard simulator split step_overhead_us system system_config "
    "table test_by timeline timeout tokens tp untrusted vp workload zero"
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
    "stragglers": "--straggler",
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
        if flag is None:
            return argument[0]
        if argument[2] in {"True", "False"}:
            return flag if argument[2] == "True" else f"--no-{flag.removeprefix('--')}"
        return flag if argument[2] is None else f"{flag} {argument[2]}"

    return _ARGUMENT.sub(option, text)


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


def ranks_text(available: int, total: int) -> str:
    """Format a number of ranks: ``4 ranks``, or ``1 of 8 ranks`` if the input holds only some of the job."""
    return (
        counted(total, "rank")
        if available == total
        else f"{count_text(available)} of {counted(total, 'rank')}"
    )
