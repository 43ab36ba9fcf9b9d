"""Long lists of cases: a few in every run of the tests, all of them in the slow suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

__all__ = ["swept"]


def swept(cases: Iterable[Any], quick: int) -> list[Any]:
    """Parameters of a test: ``quick`` of the cases, evenly spread, and the others marked slow.

    A case that is a tuple holds a value for each argument.
    """
    listed = list(cases)
    chosen = {place * len(listed) // quick for place in range(quick)}
    return [
        pytest.param(
            *(case if isinstance(cast("object", case), tuple) else (case,)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place, case in enumerate(listed)
    ]
