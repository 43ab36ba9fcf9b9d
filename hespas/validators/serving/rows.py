"""Measured runs of servers, a row each: what was served, how, and the times that clients saw.

Columns are those of aiconfigurator's sample of measurements (``silicon_sample.csv``): ``model_path, system,
backend, precision, mode, isl, osl``, degrees of parallelism, ``silicon_ttft_ms`` and ``silicon_tpot_ms``. How
many requests were under way is in ``silicon_data_source``, or ``batch_size``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hespas.generators.llm import Layout, ServingStep, named_model, precision_of
from hespas.generators.llm.model import Experts
from hespas.graph.errors import UsageError, clipped
from hespas.hardware import canonical
from hespas.simulator.serving import POLICIES, Policy
from hespas.validators.serving.cells import Cells, read_cells
from hespas.validators.serving.launches import Launch, Started, launch_of, spreads

__all__ = ["Row", "deployment_of", "library_of", "read_rows", "refuse_empty_split", "stack_of"]

_NEEDED = (
    "model_path", "system", "backend", "mode", "isl", "osl", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
_PRECISIONS: Mapping[str, str] = {"fp8": "fp8", "fp4": "nvfp4", "bf16": "bf16", "": "bf16"}
_SPREAD_LENGTHS = re.compile(
    r"^(source_file=)?((db-dump/)?\d{4}-\d\d-\d\d|(kimi|qwen)[\w.-]*gap-analysis\.csv)"
)
"""Sources whose benchmark draws lengths evenly from 0.8 x the stated one to the stated one (InferenceMAX:
``random-range-ratio`` 0.8); others send prompts of equal length.
"""
_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run: ``concurrency`` requests under way at any time, each of ``prompt`` tokens and ``output`` ones,
    or of ``ratio`` times as many and more. ``reason`` says why it cannot be predicted (empty: it can).
    ``assumed`` names what the source does not say; ``source``: whose benchmark it was, how far that is told.
    """

    row: int
    model: str
    hardware: str
    stack: str
    release: str
    precision: str
    split: str
    prompt: int
    output: int
    concurrency: int
    ratio: float
    ttft_ms: float
    tpot_ms: float
    layout: Layout
    launch: Launch
    source: str = ""
    step: ServingStep | None = None
    reason: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Devices of the server."""
        return self.layout.ranks


def stack_of(row: Row) -> str:
    """The device and the framework that ran a row."""
    return f"{row.hardware} {row.stack}"


def library_of(row: Row) -> str:
    """The same, and the format of experts in a mixture: kernels of other formats have little in common."""
    step = row.step
    if step is None or not any(isinstance(block, Experts) for block in step.model.blocks()):
        return stack_of(row)
    return f"{stack_of(row)} {step.experts or step.precision.matmul} experts"


def deployment_of(row: Row) -> str:
    """The same, its release, the model and its precision, and whether tokens were guessed."""
    guesses = "guessing" if row.launch.drafts else ""
    return " ".join((stack_of(row), row.release, row.model, row.precision, guesses))


def read_rows(path: Path) -> list[Row]:
    """The rows of a table (CSV, packed or not; Parquet). What is understood and cannot be predicted is a row
    with its reason. Raises ``FormatError`` for a table without the columns, and for a cell that holds no such
    thing.
    """
    return [_row(cells) for cells in read_cells(path, _NEEDED)]


def refuse_empty_split(rows: Sequence[Row], split: str) -> None:
    """Raise ``UsageError`` where no row is of a ``split`` that was asked for."""
    if split and not any(row.split == split for row in rows):
        listed = ", ".join(sorted({row.split for row in rows} - {""})) or "no split"
        raise UsageError(f"no row has the split {split!r}", hint=f"the table has {clipped(listed)}")


def _row(cells: Cells) -> Row:
    source, stack = cells.text("silicon_data_source"), cells.stated("backend", "a serving stack")
    published, told = (
        bool(_SPREAD_LENGTHS.match(source)),
        re.search(r"silicon_concurrency=(\d{1,15})\b", source),
    )
    dated = re.search(r"measured=([\d-]+)", source)
    date = dated[1] if dated else ""
    model, precision = cells.stated("model_path", "a model").rpartition("/")[2], cells.text("precision")
    batch = cells.count("batch_size", 0)
    clients = int(told[1]) if told else batch
    layout, twice = _layout(cells, shares=published and stack == "vllm" and not spreads(precision, clients))
    system = cells.stated("system", "a device, as h100_sxm")
    hardware = canonical(system) or system
    step, reason = _step(model, precision, layout)
    row = Row(
        row=cells.row,
        model=model if step is None else step.model.name,
        hardware=hardware,
        stack=stack,
        release=cells.text("backend_version"),
        precision=precision or "bf16",
        split=cells.text("split"),
        prompt=cells.count("isl"),
        output=cells.count("osl"),
        concurrency=max(1, clients if told else clients * layout.dp),
        ratio=_RATIO if published else 1.0,
        ttft_ms=cells.number("silicon_ttft_ms"),
        tpot_ms=cells.number("silicon_tpot_ms"),
        layout=layout if step is None else step.layout,
        launch=Launch(policy=Policy()),
        source=_benchmark(date) if published else "others",
        assumed=_assumed(twice=twice, told=bool(told), precision=precision),
    )
    reason = _refused(cells, row, bool(clients)) or reason
    if step is None or reason:
        return replace(row, reason=reason)
    launch = launch_of(Started(
        model=row.model, hardware=hardware, stack=stack, release=row.release, precision=precision,
        layout=layout, prompt=row.prompt, output=row.output, clients=row.concurrency, date=date,
        is_published=published,
    ))  # fmt: skip
    return replace(row, launch=launch, step=replace(step, cache=launch.cache or step.cache))


def _assumed(*, twice: bool, told: bool, precision: str) -> tuple[str, ...]:
    """What the source does not say."""
    said = {"degrees counted twice": not twice, "concurrency": told, "precision": bool(precision)}
    return tuple(what for what, is_said in said.items() if not is_said)


def _refused(cells: Cells, row: Row, is_loaded: bool) -> str:
    """Why a row is not predicted, whatever its model; empty: it may be."""
    mode, tp = cells.text("mode"), row.layout.tp
    if mode in _APART:
        return _apart(cells)
    system = cells.text("system")
    reasons = {
        f"no mode {mode!r}: agg, or {', '.join(_APART)}": mode != "agg",
        f"no serving stack {row.stack}": row.stack not in POLICIES,
        f"no device {system}": not canonical(system),
        "the source does not say how many ranks share a layer": not cells.text("tp_size"),
        "the source does not say how many requests were under way": not is_loaded,
        f"{row.concurrency:,} requests under way are no load of one server": row.concurrency > _MOST_REQUESTS,
        f"requests of {row.prompt + row.output:,} tokens": row.prompt + row.output > _MOST_TOKENS,
        "no measured times": not (row.ttft_ms > 0 and row.tpot_ms > 0),
        f"the source's {tp} tensor ranks are no layout of one server": tp > _LARGEST_TENSOR,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


_APART = ("disagg",)


def _apart(cells: Cells) -> str:
    """Why servers that only prefill, and those that only decode, are not predicted."""
    names = ("prefill_num_workers", "decode_num_workers")
    if any(cells.count(name, 0, least=0) < 1 for name in names):
        return "prefill and decode on servers of their own: their numbers are not recorded"
    return "prefill and decode on servers of their own are not simulated"


_LARGEST_TENSOR = 8
_MOST_REQUESTS, _MOST_TOKENS = 1_000_000, 10**9
"""Beyond, a cell is a slip, and simulating it would take all memory there is."""
_WARMED = "2026-01-21"
"""Since this day InferenceMAX sends requests of two rounds before those that it measures; what servers
compile at the first prompts of some shape was part of its times before.
"""


def _benchmark(date: str) -> str:
    return "InferenceMAX" if not date or date >= _WARMED else f"InferenceMAX before {_WARMED}"


def _layout(cells: Cells, *, shares: bool) -> tuple[Layout, bool]:
    """The layout, and whether the source counts degrees twice: attention of ``tp`` ranks, or of data ranks,
    and experts over the same ranks, told as the product of both. ``shares``: ranks that are told as both
    share attention. A degree of 0, or none, is that of a model without such layers: 1.
    """
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, etp, ep = (max(1, cells.count(name, 1, least=0)) for name in names)
    if etp == ep > 1 and max(tp, dp) == etp * ep:
        return (Layout(dp=ep, ep=ep) if dp > 1 else Layout(tp=ep, ep=ep)), True
    if tp == dp > 1:
        return (Layout(tp=tp, ep=tp) if shares else Layout(dp=dp, ep=dp)), True
    if dp > 1:
        return Layout(dp=dp, tp=tp, ep=ep, etp=max(1, dp * tp // ep)), False
    return Layout(tp=tp, ep=ep, etp=max(1, tp // ep)), False


def _step(model: str, precision: str, layout: Layout) -> tuple[ServingStep | None, str]:
    """Whose kernels run, or why nobody's."""
    name = _MODELS.get(model, model)
    try:
        found = named_model(name)
    except UsageError:
        return None, f"no model {model}"
    mixture = any(isinstance(block, Experts) for block in found.blocks())
    matrices, experts = _PRECISIONS.get(precision, ""), ""
    if mixture and precision in _EXPERTS_ONLY:
        matrices, experts = "bf16", _EXPERTS_ONLY[precision]
    if not matrices:
        return None, f"no precision {precision} of {found.name}"
    if found.name.startswith("GPT-OSS"):
        matrices, experts = "bf16", "mxfp4"
    layout = layout if mixture else Layout(tp=layout.tp)
    return ServingStep(
        model=found, layout=layout, precision=precision_of(matrices), experts=experts, fused=True,
        cache="bf16" if precision in {"", "bf16"} else "f8E4M3FN",
    ), ""  # fmt: skip


_MODELS: Mapping[str, str] = {
    "DeepSeek-R1-NVFP4": "DeepSeek-R1",
    "Qwen3-235B-A22B-FP8": "Qwen3-235B-A22B",
    "Qwen3-32B-NVFP4": "Qwen3-32B",
    "Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "gpt-oss-120b": "GPT-OSS-120B",
}
_EXPERTS_ONLY: Mapping[str, str] = {"fp4": "nvfp4", "int4": "i4"}
"""Formats of published checkpoints that only matrices of experts have; attention keeps 16 bits."""
