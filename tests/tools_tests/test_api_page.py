"""The page of the Python interface is what its docstrings say now."""

from __future__ import annotations

import hespas
from tools.api_page import PAGE, api_document


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == api_document(), "python -m tools.api_page writes it again"


def test_every_function_and_its_result_is_on_the_page() -> None:
    page = api_document()
    for name in hespas.__all__:
        assert name.startswith("_") or f"## hespas.{name}\n" in page
    for result in (
        "Conversion",
        "NodeEstimates",
        "SimulationResult",
        "CheckReport",
        "AccuracyReport",
        "Summary",
    ):
        assert f"### {result}\n" in page
