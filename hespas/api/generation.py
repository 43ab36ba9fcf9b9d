"""Generated workloads: made from settings, written, simulated, and accounted for without being written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from hespas.analysis.traffic import matrix_of, traffic
from hespas.api.arguments import Destination, DestinationFormat, WritingJob, checked, hardware_option
from hespas.api.documents import BasisShare, Document, Result, basis_of, findings
from hespas.api.io import write
from hespas.converters import WriteOptions
from hespas.converters.chakra.sizes import trace_bytes
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.spec import Account, Generator, MemoryFigure
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UnsupportedError
from hespas.graph.hints import DEVICE, Option
from hespas.graph.passes import totals
from hespas.graph.progress import Progress
from hespas.graph.workload import step_facts
from hespas.hardware import StepFactor, System, load_device
from hespas.report import Column, Table, column_of, table_from_rows
from hespas.report.charts import Chart
from hespas.report.texts import bytes_text, count_text, counted, fits_text, flops_text
from hespas.simulator.memory import capacity_of, fits_memory

if TYPE_CHECKING:
    from hespas.api.simulation_result import SimulationResult

__all__ = ["GenerationDocument", "GenerationResult", "MemoryShare", "StepDocument", "generate"]


class MemoryShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the memory of the fullest rank. ``counted_as`` is the smallest figure that includes it:
    allocated (all tensors), reserved (also free memory of the allocator) or device (also other libraries).
    """

    what: str
    size_bytes: Figure
    counted_as: MemoryFigure


class StepDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted step of a generated workload: figures of ``hespas simulate``."""

    hardware: str
    system: str
    estimator: str
    step_ns: Figure
    step_low_ns: Figure
    step_high_ns: Figure
    operations_ns: Figure
    step_factor: StepFactor | None
    basis: list[BasisShare]
    mfu: Figure
    mfu_peak_dtype: str
    tokens_per_s: Figure


class GenerationDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas generate --json``. FLOPs are sums over all ranks. Memory is of the rank that
    needs most: of all tensors (peak), of the allocator (reserved), and the memory that the device must have.
    Collective bytes are the mean payload per rank. et_bytes is the size of the traces of all ranks,
    capacity_bytes the memory of the device if one is named.
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
    reserved_memory_bytes: Figure
    device_memory_bytes: Figure
    capacity_bytes: Figure
    fits: bool | None
    collective_bytes_per_rank: Figure
    memory: list[MemoryShare]
    step: StepDocument | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult(Result):
    """Generated workload and its account. ``et_bytes`` is NaN unless it was measured. ``step`` is the
    simulation on the device or system, if one was named.
    """

    page_title: ClassVar[str] = "Generated workload"

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
        """Return True if the memory of the fullest rank fits into the device; None if either size is
        unknown.
        """
        needed_bytes = self.account.device_memory_bytes
        return fits_memory(
            self.account.peak_memory_bytes if isnan(needed_bytes) else needed_bytes, self.capacity_bytes
        )

    @property
    def nodes_per_rank_max(self) -> int:
        """Return the number of nodes of the longest program, with unrolled loops."""
        return int(max(graph.executions.sum() for graph in self.workload.classes))

    @property
    def collective_bytes_per_rank(self) -> float:
        """Return the mean payload of the collectives of a rank in a step."""
        pairs = zip(self.workload.classes, self.workload.class_sizes, strict=True)
        return sum(totals(graph).collective_bytes * count for graph, count in pairs) / self.workload.num_ranks

    def headline(self) -> str:
        """Return the summary line: the name, and the numbers of ranks and rank classes."""
        ranks = counted(self.workload.num_ranks, "rank")
        return f"{self.workload.name}: {ranks} in {counted(len(self.workload.classes), 'class')}"

    def document(self) -> GenerationDocument:
        """Return the content of the command's ``--json`` as a typed value."""
        account, step = self.account, self.step
        step_document = None
        if step is not None:
            step_document = StepDocument(
                hardware=step.hardware,
                system=step.system,
                estimator=step.estimator,
                step_ns=step.step_ns,
                step_low_ns=step.interval_ns[0],
                step_high_ns=step.interval_ns[1],
                operations_ns=step.operations_ns,
                step_factor=step.step_factor,
                basis=basis_of(step.basis),
                mfu=step.throughput.mfu,
                mfu_peak_dtype=step.throughput.peak_dtype,
                tokens_per_s=step.throughput.tokens_per_s,
            )
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
            reserved_memory_bytes=account.reserved_memory_bytes,
            device_memory_bytes=account.device_memory_bytes,
            capacity_bytes=self.capacity_bytes,
            fits=self.fits,
            collective_bytes_per_rank=self.collective_bytes_per_rank,
            memory=[MemoryShare(**asdict(share)) for share in account.memory],
            step=step_document,
        )

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.generate/1``."""
        return document_bytes(self.document())

    def table(self) -> Table:
        """Return the memory of the fullest rank: one row per kind of content."""
        header = (Column("what"), column_of("size_bytes"), Column("counted_as"))
        return table_from_rows(header, [astuple(share) for share in self.account.memory])

    def figures(self) -> list[tuple[str, str]]:
        """Return the known figures of the workload with their values as texts."""
        account = self.account

        def beyond(size_bytes: float) -> str:
            """Return the text of a figure that includes more than the tensors."""
            return bytes_text(size_bytes) if size_bytes > account.peak_memory_bytes else ""

        capacity = (fits_text(self.fits, self.capacity_bytes) or "unknown") if self.hardware else ""
        figures = [
            ("maximum nodes per rank", count_text(self.nodes_per_rank_max)),
            ("traces of all ranks", bytes_text(self.et_bytes) if not self.written else ""),
            ("parameters", count_text(account.parameters)),
            ("model FLOPs per step", flops_text(account.model_flops_per_step)),
            ("hardware FLOPs per step", flops_text(account.hardware_flops_per_step)),
            ("collective payload per rank", bytes_text(self.collective_bytes_per_rank)),
            ("peak memory per rank", bytes_text(account.peak_memory_bytes)),
            ("reserved memory per rank", beyond(account.reserved_memory_bytes)),
            ("device memory per rank", beyond(account.device_memory_bytes)),
            (f"memory of {self.hardware}", capacity),
        ]
        return [figure for figure in figures if figure[1]]

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the figures of the workload and the memory of the fullest rank, and the bytes between ranks
        or all tables of the simulated step.
        """
        header = (Column("figure"), Column("value", kind="number", write=str))
        own = {
            "figures": table_from_rows(header, self.figures()),
            "memory_of_the_fullest_rank": self.table(),
        }
        if self.step is not None:
            return own | dict(self.step.tables_by_name())
        return own | {"traffic": traffic(self.workload)}

    def charts(self) -> tuple[Chart, ...]:
        """Return the communication matrix; with a simulated step, the charts of the step."""
        if self.step is not None:
            return self.step.charts()
        matrix = matrix_of(traffic(self.workload))
        return (matrix,) if matrix else ()


_Measure = Annotated[bool, Option("Print nodes, bytes, FLOPs and memory; write nothing.", flag="dry-run")]
_Hardware = Annotated[
    str | None,
    hardware_option("Also simulate the step on this device, and compare its peak memory with the device's."),
]
_System = Annotated[
    str | Path | System | None,
    Option(
        "Also simulate the step on this system.",
        metavar="NAME|FILE",
        panel=DEVICE,
        completes="systems",
        is_text=True,
    ),
]


@checked()
def generate(
    generator: Generator,
    destination: Destination = None,
    *,
    format: DestinationFormat = None,  # noqa: A002 # the word users know
    measure: _Measure = False,
    hardware: _Hardware = None,
    system: _System = None,
    options: WritingJob = None,
    overwrite: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> GenerationResult:
    """Make a workload, and write it to ``destination`` if given (Chakra traces unless its suffix or
    ``format`` selects another format). ``measure`` computes the size of the traces of all ranks. With
    ``hardware`` or ``system`` the step is also simulated, as by default in :func:`hespas.api.simulate`, and
    the memory of the fullest rank is compared with the memory of its device.

    Raises ``UsageError`` for contradicting settings, ``OutputError`` if nothing can be written. Equal
    settings write equal bytes.

    Examples:
        >>> step = hespas.llm_step("llama-3-8b", tp=8, seq=4096, global_batch=8)
        >>> hespas.generate(step, "traces", hardware="H100-SXM")
        <GenerationResult: Llama-3-8B: 8 ranks in 1 class>
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    if hardware:
        load_device(hardware)  # an unknown name is reported before anything is written
    workload = generator.workload()
    size = 0
    if destination is not None:
        chosen = options or WriteOptions(progress=progress)
        size = write(
            workload, destination, format=format, overwrite=overwrite, options=chosen, diagnostics=sink
        )
    step = None
    if hardware or system is not None:
        from hespas.api.simulation import simulate

        step = simulate(workload, hardware, system=system, diagnostics=sink)
    device = step.hardware if step is not None else ""
    capacity_bytes, account = nan, generator.account()
    if device:
        capacity_bytes = capacity_of(load_device(device), step_facts(workload.metadata))
        account = account.on_device(load_device(device).kind)
    et_bytes = nan
    if measure:
        try:
            et_bytes = float(trace_bytes(workload))
        except UnsupportedError as error:  # too large to be written
            message = f"traces cannot be written: {error.message}"
            sink.warning("generate.no-traces", workload.name, message)
    return GenerationResult(
        workload=workload,
        account=account,
        diagnostics=sink,
        et_bytes=et_bytes,
        written="" if destination is None else str(destination),
        written_bytes=size,
        hardware=device,
        capacity_bytes=capacity_bytes,
        step=step,
    )
