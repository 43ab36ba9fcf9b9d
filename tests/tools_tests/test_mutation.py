"""The modules of the mutation tests and their tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutation import MODULES, MutationScore, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_their_tests_exist(module: str) -> None:
    assert (ROOT / module).is_file()
    assert all((ROOT / path).exists() for path in MODULES[module])


def test_a_score_is_the_share_of_killed_mutants() -> None:
    assert MutationScore(4, 3, ("- a\n+ b",)).share == 0.75
    assert MutationScore(0, 0, ()).share == 1.0


def test_an_unknown_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hespas/nothing.py"])
    assert "unknown module hespas/nothing.py" in capsys.readouterr().err
