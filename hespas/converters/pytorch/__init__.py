"""PyTorch's traces of a run, https://docs.pytorch.org/docs/stable/profiler.html, in three formats.

``kineto`` is the profiler trace of one rank, a profile. ``pytorch-et`` is the host execution trace of one
rank, a graph without times. ``pytorch`` is a folder with files of all ranks, linked into one measured
workload. Importing this module is cheap.
"""

from __future__ import annotations

from hespas.converters.format import Format, lazily

__all__ = ["ET_SCHEMAS", "FORMAT", "FORMAT_ET", "FORMAT_KINETO"]

ET_SCHEMAS = (
    "1.0.1",
    "1.0.2-chakra.0.0.4",
    "1.0.3-chakra.0.0.4",
    "1.0.4-chakra.0.0.4",
    "1.1.0-chakra.0.0.4",
    "1.1.1-chakra.0.0.4",
    "1.1.1-chakra.1.0.0",
)
"""Schemas of execution traces that are read, oldest first."""


FORMAT_KINETO = Format(
    name="kineto",
    title="PyTorch profiler trace (Kineto)",
    suffixes=(".pt.trace.json", ".trace.json"),
    specification="https://github.com/pytorch/kineto",
    sniff=lazily("hespas.converters.pytorch.recognition:score_profile"),
    read=lazily("hespas.converters.pytorch.kineto:read_kineto"),
    copy=lazily("hespas.converters.pytorch.kineto:copy_kineto"),
    as_workload="pytorch",
    reads_options=("capture",),
)

FORMAT_ET = Format(
    name="pytorch-et",
    title="PyTorch host execution trace",
    suffixes=(".et.json",),
    specification="https://github.com/pytorch/pytorch",
    sniff=lazily("hespas.converters.pytorch.recognition:score_execution_trace"),
    read=lazily("hespas.converters.pytorch.host_trace:read_execution_trace"),
    read_versions=ET_SCHEMAS,
)

FORMAT = Format(
    name="pytorch",
    title="PyTorch profiles and execution traces of all ranks, linked",
    suffixes=(),
    specification="https://github.com/pytorch/kineto",
    sniff=lazily("hespas.converters.pytorch.recognition:score_folder"),
    read=lazily("hespas.converters.pytorch.folder:read_folder"),
    reads_options=("capture",),
    read_versions=ET_SCHEMAS,
)
