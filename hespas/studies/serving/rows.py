"""Tables of measured runs of servers: model, settings, and the mean TTFT and TPOT of clients.

The columns are as in aiconfigurator's sample of measurements (``silicon_sample.csv``): ``model_path, system,
backend, precision, mode, isl, osl``, degrees of parallelism, ``silicon_ttft_ms`` and ``silicon_tpot_ms``. The
number of concurrent requests is ``concurrency``, or ``batch_size`` for each data-parallel rank. Rows with
separate prefill and decode servers have the number, the degrees and the batch size of each kind of server
(``prefill_num_workers, decode_tp_size``, ...). ``num_speculative_tokens`` is the number of speculative tokens
per step (empty: as in the launch scripts of the benchmark; vLLM's name). ``benchmark``
and ``measured`` (a date) select the scripts that started the server. In that sample, the cell
``silicon_data_source`` contains the last three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hespas.files.tables import Column, read_typed_table
from hespas.generators.llm import Layout, ServingStep, named_model, precision_of
from hespas.generators.llm.model import Experts
from hespas.graph.deprecation import RenamedAttribute
from hespas.graph.errors import UsageError, clipped
from hespas.hardware import canonical_name
from hespas.simulator.serving import POLICIES, Policy
from hespas.simulator.serving.engine_parameters import Stack
from hespas.studies.serving.launches import ServerLaunch, ServerStart, has_data_parallel_ranks, launch_of

__all__ = [
    "PrefillServers",
    "ServingRow",
    "deployment_of",
    "engine_of",
    "library_of",
    "read_rows",
    "refuse_empty_split",
    "stack_of",
]

_Degree = Annotated[int, Column(low=0)]


class _RunColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a table of measured serving runs. Degrees of parallelism are 1 if they are empty. They may
    also be 0 for a kind of layer that the model does not have, which means 1.
    """

    model_path: str
    system: str
    backend: str
    backend_version: str = ""
    precision: str = ""
    mode: Annotated[str, Column(is_in_header=True)] = ""
    isl: Annotated[int, Column(low=1, unit="tokens")]
    osl: Annotated[int, Column(low=1, unit="tokens")]
    tp_size: Annotated[int, Column(low=0, is_in_header=True)] = -1
    attention_dp_size: _Degree = 1
    moe_tp_size: _Degree = 1
    moe_ep_size: _Degree = 1
    prefill_num_workers: _Degree = 0
    prefill_tp_size: Annotated[int, Column(low=0)] = -1
    prefill_attention_dp_size: _Degree = 1
    prefill_moe_tp_size: _Degree = 1
    prefill_moe_ep_size: _Degree = 1
    decode_num_workers: _Degree = 0
    decode_tp_size: Annotated[int, Column(low=0)] = -1
    decode_attention_dp_size: _Degree = 1
    decode_moe_tp_size: _Degree = 1
    decode_moe_ep_size: _Degree = 1
    decode_batch_size: Annotated[int, Column(low=1)] = 0
    batch_size: Annotated[int, Column(low=1)] = 0
    concurrency: Annotated[int, Column(low=1)] = 0
    num_speculative_tokens: Annotated[int, Column(low=0, high=64)] = -1
    benchmark: Literal["", "InferenceMAX"] = ""
    measured: str = ""
    silicon_data_source: str = ""
    silicon_ttft_ms: Annotated[float, Column(unit="ms", is_in_header=True)] = nan
    silicon_tpot_ms: Annotated[float, Column(unit="ms", is_in_header=True)] = nan
    split: str = ""


_PRECISIONS: Mapping[str, str] = {
    "fp8": "fp8", "fp4": "nvfp4", "bf16": "bf16", "": "bf16", "fp16": "fp16", "mxfp8": "mxfp8",
    "int8": "int8",
}  # fmt: skip
_INFERENCEMAX = re.compile(
    r"^(source_file=)?((db-dump/)?\d{4}-\d\d-\d\d|(kimi|qwen)[\w.-]*gap-analysis\.csv)"
)
"""Files of InferenceMAX in the sample of aiconfigurator."""
_RATIO = 0.8
"""InferenceMAX draws lengths uniformly from 0.8 x to 1 x the length of the row (``random-range-ratio``).
Other sources send prompts of equal length.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillServers:
    """Separate prefill servers: their number, layout and serving step."""

    servers: int
    layout: Layout
    step: ServingStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """Measured serving run with ``concurrency`` concurrent requests.

    Each request has ``prompt`` input tokens and ``output`` output tokens. If ``ratio`` is below 1, lengths
    are random between ``ratio`` times these numbers and these numbers. ``reason`` explains why the run cannot
    be predicted; empty if it can. ``assumed`` lists settings that the source does not state. ``source`` is
    the benchmark, if known. ``servers`` is the number of servers with the layout and the step. If there are
    separate prefill servers (``prefill``), these servers only decode.
    """

    row: int
    model: str
    hardware: str
    engine: str
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
    launch: ServerLaunch
    source: str = ""
    step: ServingStep | None = None
    servers: int = 1
    prefill: PrefillServers | None = None
    reason: str = ""
    assumed: tuple[str, ...] = ()
    stack = RenamedAttribute("engine")

    @property
    def ranks(self) -> int:
        """Return the number of devices of all servers."""
        separate = self.prefill.servers * self.prefill.layout.ranks if self.prefill else 0
        return self.servers * self.layout.ranks + separate

    @property
    def clients(self) -> int:
        """Return the number of concurrent requests of a replica of attention that decodes."""
        return max(1, round(self.concurrency / (self.servers * self.layout.dp)))


def engine_of(row: ServingRow) -> str:
    """Return a name for the device and the serving engine of a row. Engines with separate prefill and decode
    servers have other routers and overheads.
    """
    return Stack(row.hardware, row.engine, is_disaggregated=row.prefill is not None).name


def stack_of(row: ServingRow) -> Stack:
    """Return the device and the serving engine of a row, and for MoE models the format of experts."""
    experts = "" if row.step is None else row.step.expert_format
    return Stack(row.hardware, row.engine, experts, row.prefill is not None)


def library_of(row: ServingRow) -> str:
    """Return a name for the kernels that a row uses: the name of its stack."""
    return stack_of(row).name


def deployment_of(row: ServingRow) -> str:
    """Return a name for the deployment of a row: device and engine with release, model, precision and the use
    of speculative tokens.
    """
    speculation = "guessing" if row.launch.drafts else ""
    return " ".join((engine_of(row), row.release, row.model, row.precision, speculation))


def read_rows(path: Path) -> list[ServingRow]:
    """Read the rows of a table (CSV, gzipped or not; Parquet). A row that cannot be predicted has a
    ``reason``.

    Raises ``FormatError`` for a table without the columns, and for an invalid cell.
    """
    return [_serving_row(row.row, _unpacked(cells)) for row, cells in read_typed_table(path, _RunColumns)]


def refuse_empty_split(rows: Sequence[ServingRow], split: str) -> None:
    """Raise ``UsageError`` if no row belongs to ``split``; an empty split means all rows."""
    if split and not any(row.split == split for row in rows):
        listed = ", ".join(sorted({row.split for row in rows} - {""}))
        hint = f"choose from {clipped(listed)}" if listed else "leave `split` empty: the table has no splits"
        raise UsageError(f"no row of the table has the split {split!r}", hint=hint)


def _unpacked(cells: _RunColumns) -> _RunColumns:
    """Return the cells of a row. Empty columns are filled from the text in ``silicon_data_source``."""
    source = cells.silicon_data_source
    concurrency = re.search(r"silicon_concurrency=(\d{1,15})\b", source)
    dated = re.search(r"measured=([\d-]+)", source)
    return msgspec.structs.replace(
        cells,
        concurrency=cells.concurrency or (int(concurrency[1]) if concurrency else 0),
        benchmark=cells.benchmark or ("InferenceMAX" if _INFERENCEMAX.match(source) else ""),
        measured=cells.measured or (dated[1] if dated else ""),
    )


def _serving_row(number: int, cells: _RunColumns) -> ServingRow:
    """Convert a row of the table of measured runs."""
    engine, date = cells.backend, cells.measured
    is_published = cells.benchmark == "InferenceMAX"
    # a checkpoint's name adds tuning, date and number format: Llama-3.3-70B-Instruct-FP8
    model, checkpoint_format = cells.model_path.rpartition("/")[2].removeprefix("Meta-"), ""
    while matched := _SUFFIX.search(model):
        model = model[: matched.start()]
        checkpoint_format = _FORMATS.get(matched[1].casefold(), checkpoint_format)
    precision = cells.precision.casefold() or checkpoint_format
    precision = _FORMATS.get(precision, precision)
    clients = cells.concurrency or cells.batch_size
    shares_attention = is_published and engine == "vllm" and not has_data_parallel_ranks(precision, clients)
    is_separate = (
        cells.mode == _DISAGGREGATED and min(cells.prefill_num_workers, cells.decode_num_workers) > 0
    )
    prefix = "decode_" if is_separate else ""
    layout, counted_twice = _layout(cells, prefix, shares_attention=shares_attention)
    prefill = None
    if is_separate:
        clients = cells.concurrency or cells.decode_batch_size * cells.decode_num_workers
        own, is_doubtful = _layout(cells, "prefill_", shares_attention=False)
        prefill = PrefillServers(servers=cells.prefill_num_workers, layout=own)
        counted_twice |= is_doubtful
    hardware = canonical_name(cells.system) or cells.system
    step, reason = _step(model, precision, layout)
    if prefill is not None and step is not None:
        own_step, reason = _step(model, precision, prefill.layout)
        if own_step is not None:
            prefill = replace(prefill, step=own_step, layout=own_step.layout)
    benchmark = "InferenceMAX" if not date or date >= _WARMUP_DATE else f"InferenceMAX before {_WARMUP_DATE}"
    is_in_source = {
        "degrees counted twice": not counted_twice,
        "concurrency": cells.concurrency > 0,
        "precision": bool(precision),
    }
    row = ServingRow(
        row=number,
        model=model if step is None else step.model.name,
        hardware=hardware,
        engine=engine,
        release=cells.backend_version,
        precision=precision or "bf16",
        split=cells.split,
        prompt=cells.isl,
        output=cells.osl,
        concurrency=max(1, cells.concurrency or clients * layout.dp),
        ratio=_RATIO if is_published else 1.0,
        ttft_ms=cells.silicon_ttft_ms,
        tpot_ms=cells.silicon_tpot_ms,
        layout=layout if step is None else step.layout,
        launch=ServerLaunch(policy=Policy()),
        source=("disaggregated, " if prefill else "") + (benchmark if is_published else "others"),
        servers=cells.decode_num_workers if is_separate else 1,
        prefill=prefill,
        assumed=tuple(fact for fact, is_given in is_in_source.items() if not is_given),
    )
    reason = _refusal(cells, row, bool(clients)) or reason
    if step is None or reason:
        return replace(row, reason=reason)
    launch = launch_of(ServerStart(
        model=row.model, hardware=hardware, engine=engine, release=row.release, precision=precision,
        layout=layout, prompt=row.prompt, output=row.output, clients=row.concurrency, date=date,
        is_published=is_published, is_disaggregated=is_separate,
    ))  # fmt: skip
    if cells.num_speculative_tokens >= 0:
        launch = replace(launch, drafts=cells.num_speculative_tokens)
    return replace(row, launch=launch, step=replace(step, cache=launch.cache or step.cache))


def _layout(cells: _RunColumns, prefix: str, *, shares_attention: bool) -> tuple[Layout, bool]:
    """Return the layout of a server from the degrees in columns with a ``prefix``, and True if the source
    multiplied degrees that use the same ranks: attention over tensor- or data-parallel ranks, and experts.

    Ranks that are given as both tensor-parallel and data-parallel are tensor-parallel with
    ``shares_attention``, otherwise data-parallel.
    """
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, etp, ep = (max(1, getattr(cells, f"{prefix}{name}")) for name in names)
    if etp == ep > 1 and max(tp, dp) == etp * ep:
        return (Layout(dp=ep, ep=ep) if dp > 1 else Layout(tp=ep, ep=ep)), True
    if tp == dp > 1:
        return (Layout(tp=tp, ep=tp) if shares_attention else Layout(dp=dp, ep=dp)), True
    if dp > 1:
        return Layout(dp=dp, tp=tp, ep=ep, etp=max(1, dp * tp // ep)), False
    return Layout(tp=tp, ep=ep, etp=max(1, tp // ep)), False


def _refusal(cells: _RunColumns, row: ServingRow, has_load: bool) -> str:
    """Return the reason why a row cannot be predicted, apart from its model; empty if it can be predicted."""
    mode, tp = cells.mode, row.layout.tp
    if mode == _DISAGGREGATED and row.prefill is None:
        return "disaggregated prefill and decode: the numbers of servers are not recorded"
    reasons = {
        f"unknown mode {mode!r}: expected agg or {_DISAGGREGATED}": mode not in {"agg", _DISAGGREGATED},
        f"unknown serving engine {row.engine}": row.engine not in POLICIES,
        f"unknown device {cells.system}": not canonical_name(cells.system),
        "the source does not state tp_size": cells.tp_size < 0 and row.prefill is None,
        "the source does not state prefill_tp_size": cells.prefill_tp_size < 0 and row.prefill is not None,
        "the source does not state decode_tp_size": cells.decode_tp_size < 0 and row.prefill is not None,
        "the source does not state the concurrency": not has_load,
        f"{row.concurrency:,} concurrent requests exceed one server": row.concurrency > _MAX_REQUESTS,
        f"requests of {row.prompt + row.output:,} tokens": row.prompt + row.output > _MAX_TOKENS,
        "no measured times": not (row.ttft_ms > _LEAST_MS and row.tpot_ms > _LEAST_MS),
        "answers of one token have no time per output token": row.output < 2,
        f"{row.ranks:,} devices": row.ranks > _MAX_DEVICES,
        f"the source's {tp} tensor-parallel ranks exceed one server": tp > _MAX_TENSOR_RANKS
        and not row.prefill,
    }
    return next((reason for reason, is_true in reasons.items() if is_true), "")


_DISAGGREGATED = "disagg"
_MAX_TENSOR_RANKS = 8
_MAX_REQUESTS, _MAX_TOKENS, _MAX_DEVICES = 1_000_000, 10**9, 100_000
"""Larger values are errors in the table, and their simulation would exhaust the memory."""
_LEAST_MS = 1e-6
"""Times up to a nanosecond are errors in the table."""
_WARMUP_DATE = "2026-01-21"
"""Since this date InferenceMAX warms servers up with two rounds of requests; before, its times included the
compilation at the first prompts of each shape.
"""


def _step(model: str, precision: str, layout: Layout) -> tuple[ServingStep | None, str]:
    """Return the generator of the model's serving step, or None and the reason why it has none."""
    try:
        spec = named_model(model)
    except UsageError:
        return None, f"unknown model {model}"
    mixture = any(isinstance(block, Experts) for block in spec.blocks())
    matrices, experts = _PRECISIONS.get(precision, ""), ""
    if mixture and precision in _EXPERTS_ONLY:
        matrices, experts = "bf16", _EXPERTS_ONLY[precision]
    if not matrices:
        return None, f"unsupported precision {clipped(precision)} of {spec.name}"
    if spec.name.startswith("GPT-OSS"):
        matrices, experts = "bf16", "mxfp4"
    layout = layout if mixture else Layout(tp=layout.tp)
    return ServingStep(
        model=spec, layout=layout, precision=precision_of(matrices), experts=experts, fused=True,
        cache="bf16" if precision in _WIDE else "f8E4M3FN",
    ), ""  # fmt: skip


_FORMATS: Mapping[str, str] = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp8": "fp8", "float8": "fp8",
    "fp8_block": "fp8", "mxfp8": "mxfp8", "fp4": "fp4", "nvfp4": "fp4", "int8": "int8", "int4": "int4",
    "w4a16": "int4", "awq": "int4", "gptq": "int4",
}  # fmt: skip
"""Spellings of number formats in tables and names of checkpoints."""
_SUFFIX = re.compile(
    rf"[-_](instruct|thinking|chat|base|it|hf|\d{{4}}|v0\.\d|{'|'.join(_FORMATS)})$", re.IGNORECASE
)
_WIDE = frozenset({"", "bf16", "fp16"})
_EXPERTS_ONLY: Mapping[str, str] = {"fp4": "nvfp4", "int4": "i4"}
"""Formats of published checkpoints that apply to experts only; attention keeps 16 bits."""
