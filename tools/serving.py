"""Errors of predicted times of servers: ``docs/accuracy/serving.md`` and ``serving.csv``, and the parameters
of engines that ship with the package.

``python -m tools.serving RUNS RECORDED_RUNS RECORDED_REQUESTS`` takes the tables of ``hespas-validate
serving``. The repository does not contain these tables.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hespas.simulator.serving.engine_parameters import (
    PARAMETERS_FILE,
    EngineParameters,
    engine_parameters,
    shared_parameters,
)
from hespas.studies.serving import (
    CALIBRATIONS,
    EngineFit,
    EvaluatedRun,
    RunReplay,
    ServingErrors,
    ServingPredictor,
    evaluate_runs,
    read_recorded,
    read_rows,
    replay_runs,
)
from hespas.studies.serving.fit import PRIORS
from tools.documents import ROOT, csv_text

__all__ = ["main", "pages"]

FOLDER = ROOT / "docs" / "accuracy"
_SPLIT = "devval"
_HEAD = """# Servers

This page compares predictions of `hespas serve` with measured LLM servers: time to first token (TTFT), time
per output token (TPOT) and tokens/s. Made by `python -m tools.serving RUNS RECORDED_RUNS
RECORDED_REQUESTS`; do not edit.

RUNS is a public sample of measurements, aiconfigurator's `silicon_sample.csv` at commit 095f58a5. Its rows
are servers with a fixed number of clients, and means of TTFT and TPOT over their requests. Tokens/s follow
from both times and the number of clients. Fits use the rows of the split `calib`, the tables below the rows
of `devval`. Errors are the absolute values of predicted / measured - 1. For comparison, naive predictions
use a constant fraction of the memory bandwidth (TPOT) and of the peak FLOP/s (TTFT): the median of the
engine. [Serving-engine overhead](../how-to/serve.md#serving-engine-overhead) describes the calibrations.
[serving.csv](serving.csv) has these errors and others by source, engine and model for every calibration.

Most runs come from InferenceMAX, a public benchmark. Its scripts state the launch settings, and the
simulation uses them: maximum tokens of a step, maximum sequences, cache memory, SGLang's
scheduler-recv-interval, TensorRT-LLM's batch_wait_timeout_iters, speculative tokens and CUDA graphs. The
rows `others` are aiconfigurator's own runs with unknown settings.

Rows with `separate prefill and decode` servers (disaggregated serving) state the number and the layout of
both kinds of servers. Their other settings are unknown: the simulation uses the defaults of the engine, no
speculative tokens, and 400 Gb/s per device for KV caches. They are stacks of their own.
"""
_LEFT_OUT, _NEW_DEVICE = "one-per-deployment, new stack", "shipped, new device"
_TARGETS = {"ttft": 0.16, "tpot": 0.07, "tokens_per_s": 0.06}
_TARGET = """
## Against the targets

Targets are {ttft:.0%} (TTFT), {tpot:.0%} (TPOT) and {tokens_per_s:.0%} (tokens/s) for the median error,
if one run of each *deployment* (device, framework, release, model, precision) is measured for calibration. A
*stack* is a device, an engine, and for mixtures of experts the format of the experts. The calibrations differ
in the runs that they use:

- `none` uses none, and simulates kernels alone.
- `shipped` uses none. As in `hespas serve`, the parameters of the stack that ship with the package
  (`engine_parameters.toml`) correct the kernels: fits to the rows of `calib`.
- `{new_device}` leaves out the device: host times of prompts and requests are the medians of the engine's
  stacks on other devices, and kernels are not corrected.
- `one-per-deployment` uses that one run. Its prior is the parameters of `shipped`, whose rows include other
  runs of the deployment.
- `{left_out}` uses that one run as for a device that does not ship with the package.
  Its prior is the median parameters of the engine on the other devices.
- `stack-and-one` uses it together with all runs of its stack. The weight of the run depends on how well one
  run predicts other runs of the stack's deployments.
- `stack` uses all runs of the stack and has no parameters of deployments.
- `stack-and-deployment` fits parameters to all runs of each deployment, which the targets do not allow.

{predicted} of {wanted} rows are predicted; the last table of this section has the reasons for the others.

| calibration | runs | n | TTFT | TPOT | tokens/s | missed by (percentage points) |
|---|---|---|---|---|---|---|"""
_MISSES = """
Known causes of the remaining errors:

- `InferenceMAX before 2026-01-21`: these runs had no warm-up, so their mean TTFT includes the compilation
  for the first prompts of a shape (mainly SGLang with DeepSeek). The simulation does not include it.
- `InferenceMAX`: DeepSeek in 8 bits ran on SGLang with and without speculative tokens. For up to 64 clients
  no column distinguishes the two, so all runs are simulated without. The acceptance rate of speculative
  tokens depends on the text, but the fit has one number per stack. Repeated runs differ as well (GPT-OSS on
  vLLM).
- `others`: the TTFT of TensorRT-LLM 1.0.0rc3 with Llama-3.1-8B grows with the length of answers. Requests
  seem to wait for free slots, but the limit of slots is unknown. The TTFT of vLLM 0.12.0 with prompts of
  1,024 tokens is shorter than possible if all clients send at once.
- `separate prefill and decode`: some servers for answers have as many slots as clients, or fewer, and their
  limit is not in the table. Requests then wait for a slot half as long as they run, or not at all, and the
  TTFT of equal layouts differs by factors of up to ten.
- A single run predicts the TTFT of the other runs of its deployment badly: the difference is as large as
  the residual of the stack's fit (`stack` against `stack-and-one`). All runs of a deployment together
  predict it much better.

Rows that are not predicted:

| rows | reason |
|---|---|"""
_COLUMNS = (
    "calibration", "by", "runs", "metric", "n", "median", "mean", "P90", "bias", "in 90 %", "naive median",
    "naive mean",
)  # fmt: skip
_RECORDED = """
## Recorded runs

These tests replay runs request by request, with the recorded arrivals and lengths. The runs are
LLMServingSim's recordings of vLLM (casys-kaist/LLMServingSim at 5daddb21, MIT). Calibrated runs have two
fitted factors: on all kernels of a device, from its run on one rank, and on its collectives, from its run
on two. The first fifth of the finished requests calibrates; the others are compared. Errors are signed
errors of means, and of percentiles over the requests. *Faster* is the duration of the run divided by the
time of its simulation; the value in parentheses includes the simulations for the calibration.

| run | calibrated | requests | TTFT | TPOT | latency | makespan | tokens/s \
| TTFT P50, P90, P99 | TPOT P50, P90, P99 | faster |
|---|---|---|---|---|---|---|---|---|---|---|"""


def pages(
    calibrations: list[ServingErrors],
    left_out: ServingErrors,
    new_device: ServingErrors,
    replays: list[RunReplay],
) -> dict[str, str]:
    """Return the page and a CSV of all errors by file name. ``left_out`` are fits to one run per deployment
    whose priors are of other devices, ``new_device`` predictions with parameters of other devices.
    """
    rows = calibrations[0].rows
    predicted = sum(each.status == "predicted" for each in rows)
    target = _TARGET.format(
        **_TARGETS, predicted=predicted, wanted=len(rows), left_out=_LEFT_OUT, new_device=_NEW_DEVICE
    )
    parts = [
        _HEAD,
        target,
        *_against_targets(
            [(each.calibrate, each) for each in calibrations]
            + [(_NEW_DEVICE, new_device), (_LEFT_OUT, left_out)]
        ),
        _MISSES,
        *_refused(calibrations[0]),
    ]
    parts.append(_RECORDED)
    parts += [
        f"| {each.trace} | {'yes' if each.calibrated else 'no'} | {each.requests} | {each.ttft_error:+.1%} | "
        f"{each.tpot_error:+.1%} | {each.latency_error:+.1%} | {each.makespan_error:+.1%} | "
        f"{each.tokens_per_s_error:+.1%} | {_percentiles(each, 'ttft')} | {_percentiles(each, 'tpot')} | "
        f"{_faster(each)} |"
        for each in replays
    ]
    return {"serving.md": "\n".join(parts) + "\n", "serving.csv": csv_text(_COLUMNS, _rows(calibrations))}


def _rows(calibrations: list[ServingErrors]) -> Iterator[Sequence[str]]:
    """Yield the errors of each calibration over all runs, and by source, engine, and model and precision."""
    for errors in calibrations:
        for each in errors.summaries():
            yield (
                errors.calibrate,
                each.by,
                each.value,
                each.metric,
                f"{each.n}",
                *map(_percent, (each.median_ape, each.mean_ape, each.p90_ape)),
                f"{each.bias:+.1%}",
                _percent(each.interval_coverage),
                *map(_percent, (each.baseline_median_ape, each.baseline_mean_ape)),
            )


def _faster(each: RunReplay) -> str:
    alone = f"{each.measured_s / each.computed_s:.0f}"
    return (
        f"{alone} ({each.measured_s / (each.computed_s + each.calibrating_s):.0f})"
        if each.calibrated
        else alone
    )


def _percentiles(each: RunReplay, name: str) -> str:
    return ", ".join(
        f"{getattr(each, f'{name}_{percentile}_error'):+.0%}" for percentile in ("p50", "p90", "p99")
    )


def _against_targets(calibrations: list[tuple[str, ServingErrors]]) -> list[str]:
    """Return a row for all runs and a row for each kind of servers and each source, for each calibration with
    its name.
    """
    naive = {each.metric: each for each in calibrations[0][1].summaries() if each.by == "all"}
    medians = [_percent(naive[name].baseline_median_ape) for name in _TARGETS]
    found = [f"| (naive) | all | {naive['ttft'].n} | {' | '.join(medians)} | - |"]
    for label, errors in calibrations:
        if label == "one-per-stack":
            continue
        summaries = [each for each in errors.summaries() if each.by in {"all", "servers", "source"}]
        for value in dict.fromkeys(each.value for each in summaries):
            of = {each.metric: each for each in summaries if each.value == value}
            medians = [_percent(of[name].median_ape) for name in _TARGETS]
            misses = [
                f"{name} {100 * (of[name].median_ape - target):.1f}"
                for name, target in _TARGETS.items()
                if of[name].median_ape > target
            ]
            found.append(
                f"| {label} | {value} | {of['ttft'].n} | {' | '.join(medians)} | "
                f"{', '.join(misses) or 'met'} |"
            )
    return found


def _refused(errors: ServingErrors) -> list[str]:
    left = Counter(each.status for each in errors.rows if each.status != "predicted")
    return [f"| {count} | {reason} |" for reason, count in left.most_common()]


def _percent(value: float) -> str:
    return f"{value:.1%}" if value == value else "-"  # noqa: PLR0124 # NaN is the only number unlike itself


def parameters_text(fits: Mapping[str, EngineFit]) -> str:
    """Return the file of the parameters of engines."""
    lines = ["# Made by python -m tools.serving; do not edit. Times in ns, other parameters are factors."]
    for name, fit in sorted(fits.items()):
        lines += ["", "[[engine]]", f'name = "{name}"', f"rows = {fit.rows}"]
        lines += [f"apart = {float(fit.apart)}", "[engine.parameters]"]
        lines += [f"{key} = {float(f'{getattr(fit.correction, key):.4g}')}" for key in PRIORS]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write page and CSV; return 2 without the tables."""
    if len(sys.argv) != 4:
        sys.stderr.write(__doc__ or "")
        return 2
    runs, recorded, requests = map(Path, sys.argv[1:])
    rows, predictor = read_rows(runs), ServingPredictor()
    known: dict[str, EngineFit] = {}
    evaluate_runs(rows, calibrate="stack", split=_SPLIT, predictor=predictor, cached_fits=known, priors={})
    PARAMETERS_FILE.write_text(parameters_text(known), encoding="utf-8")
    engine_parameters.cache_clear()
    calibrations = [
        evaluate_runs(rows, calibrate=each, split=_SPLIT, predictor=predictor, cached_fits=known)
        for each in CALIBRATIONS
    ]
    stacks = {name: prior for name, prior in engine_parameters().items() if name in known}
    of_others: dict[str, EngineParameters] = {}
    for name in stacks:
        engine = name.partition(" ")[2]
        shared = shared_parameters(prior for prior in stacks.values() if prior.name != name)
        if engine in shared:
            of_others[name] = shared[engine]
    left_out = evaluate_runs(
        rows, calibrate="one-per-deployment", split=_SPLIT, predictor=predictor, priors=of_others
    )
    of_devices: list[EvaluatedRun] = []
    for device in {row.hardware for row in rows}:
        others = {name: stack for name, stack in stacks.items() if name.partition(" ")[0] != device}
        members = [row for row in rows if row.hardware == device]
        done = evaluate_runs(members, split=_SPLIT, predictor=predictor, priors=others)
        of_devices += done.rows
    new_device = ServingErrors(calibrate="shipped", rows=tuple(of_devices))
    replays = replay_runs(read_recorded(recorded, requests))
    for name, text in pages(calibrations, left_out, new_device, replays).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
