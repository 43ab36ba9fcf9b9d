"""PyTorch's records of a run, https://docs.pytorch.org/docs/stable/profiler.html: three formats.

``kineto`` is the profiler's trace of one rank, a profile. ``pytorch-et`` is the host execution trace of one
rank, a graph without times. ``pytorch`` is a folder with files of all ranks, linked into one measured
workload. Importing this module is cheap.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions, Value
from hespas.graph import Diagnostics

__all__ = ["FORMAT", "FORMAT_ET", "FORMAT_KINETO"]

_ET_SCHEMAS = (
    "1.0.1",
    "1.0.2-chakra.0.0.4",
    "1.0.3-chakra.0.0.4",
    "1.0.4-chakra.0.0.4",
    "1.1.0-chakra.0.0.4",
    "1.1.1-chakra.0.0.4",
    "1.1.1-chakra.1.0.0",
)


def _sniff_kineto(head: Head) -> int:
    from hespas.converters.pytorch.sniffing import score_profile

    return score_profile(head)


def _read_kineto(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.pytorch.profile import read_kineto

    return read_kineto(path, options, diagnostics)


def _sniff_et(head: Head) -> int:
    from hespas.converters.pytorch.sniffing import score_execution_trace

    return score_execution_trace(head)


def _read_et(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.pytorch.et_graph import read_execution_trace

    return read_execution_trace(path, options, diagnostics)


def _sniff_folder(head: Head) -> int:
    from hespas.converters.pytorch.sniffing import score_folder

    return score_folder(head)


def _read_folder(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.pytorch.folder import read_folder

    return read_folder(path, options, diagnostics)


FORMAT_KINETO = Format(
    name="kineto",
    title="PyTorch profiler trace (Kineto)",
    suffixes=(".pt.trace.json", ".trace.json"),
    specification="https://github.com/pytorch/kineto",
    sniff=_sniff_kineto,
    read=_read_kineto,
    as_workload="pytorch",
)

FORMAT_ET = Format(
    name="pytorch-et",
    title="PyTorch host execution trace",
    suffixes=(".et.json",),
    specification="https://github.com/pytorch/pytorch",
    sniff=_sniff_et,
    read=_read_et,
    read_versions=_ET_SCHEMAS,
)

FORMAT = Format(
    name="pytorch",
    title="PyTorch profiles and execution traces of all ranks, linked",
    suffixes=(),
    specification="https://github.com/pytorch/kineto",
    sniff=_sniff_folder,
    read=_read_folder,
    read_versions=_ET_SCHEMAS,
)
