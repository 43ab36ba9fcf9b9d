"""Workloads from settings alone: made, written, and accounted for without being written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings, write
from hespas.converters import WriteOptions
from hespas.converters.chakra.sizes import trace_bytes
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.spec import Account, Generator
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import totals
from hespas.hardware import System, load_device

if TYPE_CHECKING:
    import pandas

    from hespas.api.simulation import SimulationResult

__all__ = ["GenerationDocument", "GenerationResult", "MemoryRow", "StepDocument", "generate"]


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the memory of the fullest rank."""

    what: str
    size_bytes: Figure


class StepDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted step of a generated workload: the figures of hespas simulate."""

    hardware: str
    system: str
    estimator: str
    step_ns: Figure
    step_low_ns: Figure
    step_high_ns: Figure
    mfu: Figure
    mfu_peak_dtype: str
    tokens_per_s: Figure


class GenerationDocument(Document, frozen=True, kw_only=True):
    """What hespas generate --json writes. FLOPs are of all ranks, memory of the fullest one, collective bytes
    the mean of the payloads of a rank; et_bytes is what the traces of all ranks take. capacity_bytes is the
    memory of the device, where one is named.
    """

    schema: Literal["hespas.generate/1"] = "hespas.generate/1"
    name: str
    ranks: Count
    classes: Count
    nodes_per_rank_max: Count
    et_bytes: Figure
    model_flops_per_step: Figure
    hardware_flops_per_step: Figure
    parameters: Figure
    peak_memory_bytes: Figure
    capacity_bytes: Figure
    fits: bool | None
    collective_bytes_per_rank: Figure
    memory: list[MemoryRow]
    step: StepDocument | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult(Result):
    """A generated workload and its account; ``et_bytes`` is NaN unless it was measured. ``step`` is the
    simulation of the workload on the device or system that was named.
    """

    workload: Workload
    account: Account
    diagnostics: Diagnostics
    et_bytes: float = nan
    written: str = ""
    written_bytes: int = 0
    hardware: str = ""
    capacity_bytes: float = nan
    step: SimulationResult | None = None

    @property
    def fits(self) -> bool | None:
        """Return whether the fullest rank fits the device; None where either memory is unknown."""
        if isnan(self.account.peak_memory_bytes) or isnan(self.capacity_bytes):
            return None
        return self.account.peak_memory_bytes <= self.capacity_bytes

    @property
    def nodes_per_rank_max(self) -> int:
        """Nodes of the longest program, loops unrolled."""
        return int(max(graph.multiplicity.sum() for graph in self.workload.classes))

    @property
    def collective_bytes_per_rank(self) -> float:
        """Payloads of collectives of a rank in a step, in the mean."""
        pairs = zip(self.workload.classes, self.workload.class_sizes, strict=True)
        return sum(totals(graph).collective_bytes * count for graph, count in pairs) / self.workload.num_ranks

    def headline(self) -> str:
        """The job in a few words."""
        ranks, classes = self.workload.num_ranks, len(self.workload.classes)
        return f"{self.workload.name}: {ranks:,} ranks in {classes:,} class{'es' if classes > 1 else ''}"

    def document(self) -> GenerationDocument:
        """The document as a value."""
        account = self.account
        return GenerationDocument(
            inputs=[],
            diagnostics=findings(self.diagnostics),
            name=self.workload.name,
            ranks=self.workload.num_ranks,
            classes=len(self.workload.classes),
            nodes_per_rank_max=self.nodes_per_rank_max,
            et_bytes=self.et_bytes,
            model_flops_per_step=account.model_flops_per_step,
            hardware_flops_per_step=account.hardware_flops_per_step,
            parameters=account.parameters,
            peak_memory_bytes=account.peak_memory_bytes,
            capacity_bytes=self.capacity_bytes,
            fits=self.fits,
            collective_bytes_per_rank=self.collective_bytes_per_rank,
            memory=[MemoryRow(what=each.what, size_bytes=each.size_bytes) for each in account.memory],
            step=None if self.step is None else _step_document(self.step),
        )

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.generate/1``."""
        return document_bytes(self.document())

    def to_pandas(self) -> pandas.DataFrame:
        """What fills the memory of the fullest rank, a row each."""
        import pandas

        rows = [(each.what, each.size_bytes) for each in self.account.memory]
        return pandas.DataFrame(rows, columns=["what", "size_bytes"])


@checked()
def generate(
    generator: Generator,
    destination: str | Path | None = None,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    overwrite: bool = False,
    options: WriteOptions | None = None,
    measure: bool = False,
    hardware: str | None = None,
    system: str | Path | System | None = None,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> GenerationResult:
    """Make a workload and write it where a ``destination`` is given (Chakra traces unless its suffix or
    ``format`` says otherwise). ``measure``: find out how many bytes the traces of all ranks take. With
    ``hardware`` or ``system`` the step is also simulated, as :func:`hespas.api.simulate` does by default, and
    the memory of the fullest rank is compared with that of its device.

    Raises ``UsageError`` for settings that contradict each other, ``OutputError`` where nothing can be
    written. Equal settings write equal bytes.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    if hardware:
        load_device(hardware)  # an unknown name is reported before anything is written
    workload = generator.workload()
    size = 0
    if destination is not None:
        chosen = options or WriteOptions(progress=progress)
        size = write(
            workload, destination, format=format, overwrite=overwrite, options=chosen, diagnostics=found
        )
    step = None
    if hardware or system is not None:
        from hespas.api.simulation import simulate

        step = simulate(workload, hardware, system=system, diagnostics=found)
    device = step.hardware if step is not None else ""
    capacity = load_device(device).main_memory.capacity_bytes if device else -1
    return GenerationResult(
        workload=workload,
        account=generator.account(),
        diagnostics=found,
        et_bytes=_trace_bytes(workload, found) if measure else nan,
        written="" if destination is None else str(destination),
        written_bytes=size,
        hardware=device,
        capacity_bytes=float(capacity) if capacity >= 0 else nan,
        step=step,
    )


def _step_document(step: SimulationResult) -> StepDocument:
    return StepDocument(
        hardware=step.hardware,
        system=step.system,
        estimator=step.estimator,
        step_ns=step.step_ns,
        step_low_ns=step.low_ns,
        step_high_ns=step.high_ns,
        mfu=step.throughput.mfu,
        mfu_peak_dtype=step.throughput.peak_dtype,
        tokens_per_s=step.throughput.tokens_per_s,
    )


def _trace_bytes(workload: Workload, diagnostics: Diagnostics) -> float:
    """Return the bytes that the traces of all ranks take, NaN where they are too large to be written."""
    try:
        return float(trace_bytes(workload))
    except UnsupportedError as error:
        diagnostics.warning("generate.no-traces", workload.name, f"traces cannot be written: {error.message}")
        return nan
