"""Workloads from settings alone: made, written, and accounted for without being written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hespas.api.io import Document, Result, findings, write
from hespas.converters import WriteOptions
from hespas.converters.chakra.sizes import trace_bytes
from hespas.files.documents import Count, Figure, document_bytes
from hespas.generators.spec import Account, Generator
from hespas.graph import Diagnostics, Workload
from hespas.graph.passes import totals

if TYPE_CHECKING:
    import pandas

__all__ = ["GenerationDocument", "GenerationResult", "MemoryRow", "generate"]


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the memory of the fullest rank."""

    what: str
    size_bytes: Figure


class GenerationDocument(Document, frozen=True, kw_only=True):
    """What hespas generate --json writes. FLOPs are of all ranks, memory of the fullest one, collective bytes
    the mean of the payloads of a rank; et_bytes is what the traces of all ranks take.
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
    collective_bytes_per_rank: Figure
    memory: list[MemoryRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationResult(Result):
    """A generated workload and its account; ``et_bytes`` is NaN where it was not asked for."""

    workload: Workload
    account: Account
    diagnostics: Diagnostics
    et_bytes: float = nan
    written: str = ""
    written_bytes: int = 0

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
            collective_bytes_per_rank=self.collective_bytes_per_rank,
            memory=[MemoryRow(what=each.what, size_bytes=each.size_bytes) for each in account.memory],
        )

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.generate/1``."""
        return document_bytes(self.document())

    def to_pandas(self) -> pandas.DataFrame:
        """What fills the memory of the fullest rank, a row each."""
        import pandas

        rows = [(each.what, each.size_bytes) for each in self.account.memory]
        return pandas.DataFrame(rows, columns=["what", "size_bytes"])


def generate(
    generator: Generator,
    destination: str | Path | None = None,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    overwrite: bool = False,
    options: WriteOptions | None = None,
    measure: bool = False,
    diagnostics: Diagnostics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> GenerationResult:
    """Make a workload and write it where a ``destination`` is given (Chakra traces unless its suffix or
    ``format`` says otherwise). ``measure``: find out how many bytes the traces of all ranks take.

    Raises ``UsageError`` for settings that contradict each other, ``OutputError`` where nothing can be
    written. Equal settings write equal bytes.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    workload = generator.workload()
    size = 0
    if destination is not None:
        chosen = options or WriteOptions(progress=progress)
        size = write(
            workload, destination, format=format, overwrite=overwrite, options=chosen, diagnostics=found
        )
    return GenerationResult(
        workload=workload,
        account=generator.account(),
        diagnostics=found,
        et_bytes=float(trace_bytes(workload)) if measure else nan,
        written="" if destination is None else str(destination),
        written_bytes=size,
    )
