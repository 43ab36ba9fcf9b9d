"""League page: its figures are those of the given leagues."""

from __future__ import annotations

from hespas.studies.league.document import evaluate_league
from hespas.studies.league.evaluation import CALIBRATIONS
from hespas.studies.league.rows import LeagueRow, Refusal, StepPrediction
from tools.league import league_pages


def _row(number: int, measured_ms: float, predicted_ms: float = 100.0, **cells: str) -> LeagueRow:
    base = {
        "source": "here", "model": "Llama-3.1-405B", "accelerator": "H100-SXM", "num_accelerators": "8",
        "seq_len": "4096", "global_batch": "8", "precision": "bf16", "precision_class": "16bit",
        "mfu_pct": "40",
    }  # fmt: skip
    predicted = StepPrediction(
        time_ns=predicted_ms * 1e6, parts={"products": 7.5e7, "attention": 2.5e7}, peak_memory_bytes=1.0,
        family="Hopper", kind="dense", layout=cells.get("tp", ""),
    )  # fmt: skip
    return LeagueRow(number, base | {"step_time_ms": f"{measured_ms}"} | cells, predicted)


def test_the_page_holds_errors_orders_scaling_and_what_is_missing() -> None:
    rows = [
        _row(0, 125.0),
        _row(1, 80.0, tp="2"),
        _row(2, 125.0, num_accelerators="16", global_batch="16"),
        LeagueRow(3, {"source": "there"}, StepPrediction(refusal=Refusal(message="nobody knows the model"))),
    ]
    pages = league_pages([evaluate_league("runs.csv", rows, mode) for mode in CALIBRATIONS])
    page = pages["training.md"]
    assert "model,Llama-3.1-405B,none,3,21.7%,20.0%,24.0%,-5.0%,66.7%" in pages["training.csv"]
    assert "3 of 4 rows are predicted, 0 of them with assumed settings" in page
    assert "| none | 3 | 21.7% | 20.0% | 24.0% | -5.0% | 66.7% |" in page
    assert "| constant MFU, row left out | 3 | 0.0% | 0.0% | 0.0% |" in page
    assert "| none | 2 | 1 | 0% | 0% | 100% |  |" in page  # two that are predicted alike
    assert "| none | here | H100-SXM | bf16 | 8 | 16 |" in page
    assert "| here | 75% | 25% |" in page
    assert "| here | none | 3 | 21.7% | 20.0% | 24.0% | -5.0% | 66.7% |" in page
    assert "| 1 | nobody knows the model |" in page
    assert "| none | 1 | 22.0% | 22.0% |" in page  # one point, corrected by the factor of the smaller runs


def test_the_page_says_which_sets_are_lost_and_who_is_faster() -> None:
    rows = [
        _row(0, 100.0, tp="1"),
        _row(1, 90.0, 120.0, tp="2"),
        _row(2, 110.0, 90.0, tp="4"),
        _row(3, 50.0, 60.0, accelerator="B200-SXM"),
    ]
    page = league_pages([evaluate_league("runs.csv", rows, "none")])["training.md"]
    assert "| none | 3 and more | 1 | 0% | 0% | 0% | -1.00 |" in page
    assert "| none | here | Llama-3.1-405B | H100-SXM | 8 | 3 | 22.2% |" in page
    assert "| none | 1 | 100% |" in page
