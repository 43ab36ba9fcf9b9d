"""Measured runs of servers, a row each: what was served, how, and the times that clients saw.

Columns are those of aiconfigurator's sample of measurements (``silicon_sample.csv``): ``model_path, system,
backend, precision, mode, isl, osl``, degrees of parallelism, ``silicon_ttft_ms`` and ``silicon_tpot_ms``. How
many requests were under way is in ``silicon_data_source``, or ``batch_size``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from hespas.generators.llm import Layout, ServingStep, load_model, precision_of
from hespas.generators.llm.model import Experts
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.serving.launches import Launch, Started, launch_of, spreads

__all__ = ["Row", "deployment_of", "read_rows", "stack_of"]

_NEEDED = (
    "model_path", "system", "backend", "mode", "isl", "osl", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
_DEVICES: Mapping[str, str] = {
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "b200_sxm": "B200-SXM",
    "gb200": "GB200",
    "a100_sxm": "A100-SXM-80GB",
    "l40s": "L40S",
}
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


def deployment_of(row: Row) -> str:
    """The same, its release, the model and its precision, and whether tokens were guessed."""
    guesses = "guessing" if row.launch.drafts else ""
    return " ".join((stack_of(row), row.release, row.model, row.precision, guesses))


def read_rows(path: Path, split: str = "") -> list[Row]:
    """The rows of a table (CSV, packed or not; Parquet), of one ``split`` where it has some. Raises
    ``FormatError`` for a table without the columns.
    """
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise FormatError(f"no table: {error}", path=str(path), hint="CSV or Parquet") from error
    missing = [name for name in _NEEDED if name not in table.columns]
    if missing:
        raise FormatError(
            f"no column {missing[0]!r}", path=str(path), position="header",
            hint=f"needed are {', '.join(_NEEDED)}",
        )  # fmt: skip
    records = [{str(key): value for key, value in each.items()} for each in table.to_dict("records")]
    rows = [_row(number, record) for number, record in enumerate(records)]
    return [row for row in rows if not split or row.split == split]


def _text(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _number(record: Mapping[str, object], name: str, default: float) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and value == value else default  # noqa: PLR0124


def _degree(record: Mapping[str, object], name: str) -> int:
    return max(1, int(_number(record, name, 1.0)))


def _row(number: int, record: Mapping[str, object]) -> Row:
    source = _text(record, "silicon_data_source")
    published, stack = bool(_SPREAD_LENGTHS.match(source)), _text(record, "backend")
    told = re.search(r"silicon_concurrency=(\d+)", source)
    model, precision = _text(record, "model_path").rpartition("/")[2], _text(record, "precision")
    clients = int(told[1]) if told else round(_number(record, "batch_size", 1.0))
    layout, twice = _layout(record, shares=published and stack == "vllm" and not spreads(precision, clients))
    concurrency = clients if told else clients * layout.dp
    system = _text(record, "system")
    assumed = [*(["degrees counted twice"] if twice else []), *([] if told else ["concurrency"])]
    step, reason = _step(model, precision, layout)
    prompt, output = int(_number(record, "isl", 1.0)), int(_number(record, "osl", 1.0))
    release = _text(record, "backend_version")
    dated = re.search(r"measured=([\d-]+)", source)
    launch = launch_of(Started(
        model=model if step is None else step.model.name, hardware=_DEVICES.get(system, system), stack=stack,
        release=release, precision=precision, layout=layout, prompt=prompt, output=output,
        clients=concurrency, date=dated[1] if dated else "", is_published=published,
    ))  # fmt: skip
    if step is not None and launch.cache:
        step = replace(step, cache=launch.cache)
    if _text(record, "mode") != "agg":
        step, reason = None, _apart(record)
    elif system not in _DEVICES:
        step, reason = None, f"no device {system}"
    elif layout.tp > _LARGEST_TENSOR:
        step, reason = None, f"the source's {layout.tp} tensor ranks are no layout of one server"
    return Row(
        row=number,
        model=model if step is None else step.model.name,
        hardware=_DEVICES.get(system, system),
        stack=stack,
        release=release,
        precision=precision or "bf16",
        split=_text(record, "split"),
        prompt=prompt,
        output=output,
        concurrency=max(1, concurrency),
        ratio=_RATIO if published else 1.0,
        ttft_ms=_number(record, "silicon_ttft_ms", float("nan")),
        tpot_ms=_number(record, "silicon_tpot_ms", float("nan")),
        layout=layout if step is None else step.layout,
        launch=launch,
        source=_benchmark(dated[1] if dated else "") if published else "others",
        step=step,
        reason=reason,
        assumed=tuple(assumed),
    )


def _apart(record: Mapping[str, object]) -> str:
    """Why servers that only prefill, and those that only decode, are not predicted."""
    names = ("prefill_num_workers", "decode_num_workers")
    if any(_number(record, name, 0.0) < 1 for name in names):
        return "prefill and decode on servers of their own: their numbers are not recorded"
    return "prefill and decode on servers of their own are not simulated"


_LARGEST_TENSOR = 8
_WARMED = "2026-01-21"
"""Since this day InferenceMAX sends requests of two rounds before those that it measures; what servers
compile at the first prompts of some shape was part of its times before.
"""


def _benchmark(date: str) -> str:
    return "InferenceMAX" if not date or date >= _WARMED else f"InferenceMAX before {_WARMED}"


def _layout(record: Mapping[str, object], *, shares: bool) -> tuple[Layout, bool]:
    """The layout, and whether the source counts degrees twice: attention of ``tp`` ranks, or of data ranks,
    and experts over the same ranks, told as the product of both. ``shares``: ranks that are told as both
    share attention.
    """
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, etp, ep = (_degree(record, name) for name in names)
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
        found = load_model(name)
    except UsageError:
        return None, f"no model {model}"
    mixture = any(isinstance(block, Experts) for block in found.blocks())
    matrices, experts = _PRECISIONS.get(precision, "bf16"), ""
    if mixture and precision in _EXPERTS_ONLY:
        matrices, experts = "bf16", _EXPERTS_ONLY[precision]
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
