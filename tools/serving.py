"""How far predicted times of servers are from measured ones: ``docs/serving-accuracy.md``.

``python -m tools.serving RUNS RECORDED_RUNS RECORDED_REQUESTS``: the tables that ``hespas-validate serving``
takes. They are not part of the repository, so that the page is made where they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hespas.validators.serving import (
    CALIBRATIONS,
    Judgement,
    Predictor,
    Replay,
    judge,
    read_recorded,
    read_rows,
    replayed,
)
from tools.documents import ROOT

__all__ = ["main", "page"]

PAGE = ROOT / "docs" / "serving-accuracy.md"
_SPLIT = "devval"
_HEAD = """# Servers: predicted and measured

Made by `python -m tools.serving RUNS RECORDED_RUNS RECORDED_REQUESTS`; do not edit. RUNS is aiconfigurator's
sample of measurements (`silicon_sample.csv` at 095f58a5): means over requests of TTFT and TPOT of servers
with a fixed number of clients. Fits see its rows of the split `calib`, tables below are of `devval`; errors
are absolute, predicted over measured less 1. Tokens/s follow from both times and the number of clients. The
naive predictions use a constant part of bandwidth (TPOT) and of peak (TTFT), the median of the stack.
What calibrates: see `hespas-validate serving --help`.
"""
_TABLE = (
    "\n| runs | of | n | median | mean | P90 | bias | in 90 % | naive median | naive mean |\n|" + "---|" * 10
)
_RECORDED = """
## Recorded runs

LLMServingSim's recorded vLLM runs (casys-kaist/LLMServingSim at 5daddb21, MIT), with their arrivals and
lengths. Calibrated: a factor on all kernels of a device from its run on one rank, and one on its collectives
from that on two; of each, the fifth of the requests that was done first speaks. Signed errors of means.

| run | calibrated | TTFT | TPOT | latency | makespan | tokens/s |
|---|---|---|---|---|---|---|"""


def page(judgements: list[Judgement], replays: list[Replay]) -> str:
    """The page from its results."""
    parts = [_HEAD]
    for judged in judgements:
        parts.append(f"\n## Calibration: {judged.calibrate}\n{_TABLE}")
        parts += [
            f"| {each.value} | {each.metric} | {each.n} | {_percent(each.median_ape)} | "
            f"{_percent(each.mean_ape)} | {_percent(each.p90_ape)} | {each.bias:+.1%} | "
            f"{_percent(each.interval_coverage)} | {_percent(each.baseline_median_ape)} | "
            f"{_percent(each.baseline_mean_ape)} |"
            for each in judged.summaries()
            if each.by != "model" or judged.calibrate == "none"
        ]
    parts.append(_RECORDED)
    parts += [
        f"| {each.trace} | {'yes' if each.calibrated else 'no'} | {each.ttft_error:+.1%} | "
        f"{each.tpot_error:+.1%} | {each.latency_error:+.1%} | {each.makespan_error:+.1%} | "
        f"{each.tokens_per_s_error:+.1%} |"
        for each in replays
    ]
    return "\n".join(parts) + "\n"


def _percent(value: float) -> str:
    return f"{value:.1%}" if value == value else "-"  # noqa: PLR0124 # NaN is the only number unlike itself


def main() -> int:
    """Write the page; 2 without the tables."""
    if len(sys.argv) != 4:
        sys.stderr.write(__doc__ or "")
        return 2
    runs, recorded, requests = map(Path, sys.argv[1:])
    rows, predictor = read_rows(runs), Predictor()
    judgements = [judge(rows, calibrate=each, split=_SPLIT, predictor=predictor) for each in CALIBRATIONS]
    PAGE.write_text(page(judgements, replayed(read_recorded(recorded, requests))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
