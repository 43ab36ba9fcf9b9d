"""Reading HLO written inside a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.hlo.parser import parse_module
from hespas.converters.hlo.reader import workload_of
from hespas.converters.hlo.scan import HloText
from hespas.graph import Diagnostics, Workload

ReadText = Callable[..., tuple[Workload, Diagnostics]]


@pytest.fixture
def read_text() -> ReadText:
    def read(text: str, options: ReadOptions | None = None) -> tuple[Workload, Diagnostics]:
        diagnostics = Diagnostics()
        module = parse_module(HloText(text, "test.hlo"))
        return workload_of(module, options or ReadOptions(), diagnostics), diagnostics

    return read
