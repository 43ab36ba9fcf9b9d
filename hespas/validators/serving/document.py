"""The JSON document of predicted runs of servers."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Literal

import msgspec

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.validators.accuracy.document import DiagnosticJson, diagnostics_json
from hespas.validators.serving.capacity import Capacity, capacity_of
from hespas.validators.serving.fit import PRIORS
from hespas.validators.serving.judge import Judged, Judgement
from hespas.validators.serving.predict import Times
from hespas.validators.serving.recorded import Replay

__all__ = ["ServingAccuracyDocument", "serving_json"]


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A run; status is predicted, calibrating, or why there is no prediction."""

    row: Count
    model: str
    hardware: str
    stack: str
    release: str
    precision: str
    ranks: Count
    prompt_tokens: Count
    output_tokens: Count
    concurrency: Count
    status: str
    assumed: list[str]
    predicted_ttft_ms: Figure
    low_ttft_ms: Figure
    high_ttft_ms: Figure
    published_ttft_ms: Figure
    ttft_error: Figure
    predicted_tpot_ms: Figure
    low_tpot_ms: Figure
    high_tpot_ms: Figure
    published_tpot_ms: Figure
    tpot_error: Figure
    tokens_per_s_error: Figure
    load_share: Figure
    capacity: Capacity


class _Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the runs whose "by" is the value, beside those of the baseline."""

    calibrate: str
    by: str
    value: str
    metric: str
    n: Count
    mean_ape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Figure
    interval_coverage: Figure
    baseline_mean_ape: Figure
    baseline_median_ape: Figure


class _Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted parameter of a stack, or of one of its deployments (empty: of the stack). ``apart`` is by how
    much runs of a deployment are off unlike each other.
    """

    stack: str
    deployment: str
    name: str
    value: Figure
    standard_error: Figure
    rows: Count


class _Replay(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded run; errors are predicted over measured, less 1, of so many requests: those that were done
    after the fifth that calibrates. measured_s: how long the run took; computed_s: how long its simulation
    did; calibrating_s: how long calibration did before (null: there was none). load_share: the most asked of
    the server at once over what it holds; near and beyond 1, the time to the first token is that of a queue.
    """

    trace: str
    calibrated: bool
    requests: Count
    ttft_error: Figure
    tpot_error: Figure
    latency_error: Figure
    makespan_error: Figure
    tokens_per_s_error: Figure
    load_share: Figure
    capacity: Capacity
    put_back: Count
    measured_s: Figure
    computed_s: Figure
    calibrating_s: Figure


class ServingAccuracyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate serving --json writes."""

    schema: Literal["hespas.serving_accuracy/1"] = "hespas.serving_accuracy/1"
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[DiagnosticJson]
    calibrate: str
    rows: list[_Row]
    summary: list[_Summary]
    parameters: list[_Parameter]
    recorded: list[_Replay]


_NOTHING = Times(nan, nan)


def _row(each: Judged) -> _Row:
    row, said = each.row, each.predicted or _NOTHING
    low, high = each.low or _NOTHING, each.high or _NOTHING
    return _Row(
        row=row.row,
        model=row.model,
        hardware=row.hardware,
        stack=row.stack,
        release=row.release,
        precision=row.precision,
        ranks=row.ranks,
        prompt_tokens=row.prompt,
        output_tokens=row.output,
        concurrency=row.concurrency,
        status=each.status,
        assumed=list(row.assumed),
        predicted_ttft_ms=said.ttft_ms,
        low_ttft_ms=low.ttft_ms,
        high_ttft_ms=high.ttft_ms,
        published_ttft_ms=row.ttft_ms,
        ttft_error=each.error("ttft"),
        predicted_tpot_ms=said.tpot_ms,
        low_tpot_ms=low.tpot_ms,
        high_tpot_ms=high.tpot_ms,
        published_tpot_ms=row.tpot_ms,
        tpot_error=each.error("tpot"),
        tokens_per_s_error=each.error("tokens_per_s"),
        load_share=each.load_share,
        capacity=capacity_of(each.load_share),
    )


def _parameters(judged: Judgement) -> list[_Parameter]:
    """Of each stack, and of its deployments where these were corrected by parameters of their own."""
    found: list[_Parameter] = []
    for stack, fitted in sorted(judged.fits.items()):
        values = {name: float(getattr(fitted.correction, name)) for name in PRIORS} | {"apart": fitted.apart}
        found += [
            _Parameter(
                stack=stack, deployment="", name=name, value=value,
                standard_error=fitted.standard_errors.get(name, nan), rows=fitted.rows,
            )
            for name, value in values.items()
        ]  # fmt: skip
        if judged.calibrate != "stack-and-deployment":
            continue
        found += [
            _Parameter(
                stack=stack, deployment=key, name=name, value=getattr(own, name), standard_error=nan,
                rows=fitted.rows,
            )
            for key, own in sorted(fitted.deployments.items())
            for name in PRIORS
        ]  # fmt: skip
    return found


def serving_json(
    judged: Judgement, recorded: Sequence[Replay], inputs: Sequence[str], diagnostics: Diagnostics
) -> bytes:
    """The document: ``hespas.serving_accuracy/1``."""
    document = ServingAccuracyDocument(
        inputs=list(inputs),
        diagnostics=diagnostics_json(diagnostics),
        calibrate=judged.calibrate,
        rows=[_row(each) for each in judged.rows],
        summary=[
            _Summary(
                calibrate=judged.calibrate, by=each.by, value=each.value, metric=each.metric, n=each.n,
                mean_ape=each.mean_ape, median_ape=each.median_ape, p90_ape=each.p90_ape, bias=each.bias,
                interval_coverage=each.interval_coverage, baseline_mean_ape=each.baseline_mean_ape,
                baseline_median_ape=each.baseline_median_ape,
            )
            for each in judged.summaries()
        ],
        parameters=_parameters(judged),
        recorded=[
            _Replay(
                trace=each.trace, calibrated=each.calibrated, requests=each.requests,
                ttft_error=each.ttft_error, tpot_error=each.tpot_error, latency_error=each.latency_error,
                makespan_error=each.makespan_error, tokens_per_s_error=each.tokens_per_s_error,
                load_share=each.load_share, capacity=capacity_of(each.load_share),
                put_back=each.put_back, measured_s=each.measured_s, computed_s=each.computed_s,
                calibrating_s=each.calibrating_s,
            )
            for each in recorded
        ],
    )  # fmt: skip
    return document_bytes(document)
