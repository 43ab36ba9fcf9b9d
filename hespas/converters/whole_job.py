"""Programs of a whole job that nobody partitioned, once they have become graphs or traces."""

from __future__ import annotations

from pathlib import Path

from hespas.graph import WHOLE_JOB, Diagnostics, Workload

__all__ = ["say_whole_job"]


def say_whole_job(workload: Workload, form: str, path: Path, diagnostics: Diagnostics) -> Workload:
    """The workload, having said again what its program was: nobody who reads it here saw that
    read. ``form`` is what it is now.
    """
    parts = workload.metadata.get(WHOLE_JOB, "")
    if parts:
        diagnostics.warning(
            f"{form}.global-program",
            workload.name,
            f"it was made of a program that is sharded over {parts[:20]} partitions but not partitioned: "
            "shapes and costs are those of the whole job, counted on each device",
            path=str(path),
        )
    return workload
