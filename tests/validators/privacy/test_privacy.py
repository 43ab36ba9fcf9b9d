"""The attacker names models of original steps, and the report of an obfuscated step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hespas
from hespas.cli.convert import app as convert_app
from hespas.generators.obfuscate import Key, Obfuscate
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.validators.privacy.attacker import Attacker
from hespas.validators.privacy.fingerprint import FEATURES, fingerprint, similarity
from hespas.validators.privacy.library import HELD, UNSEEN, references, training_step
from hespas.validators.privacy.visible import visible_facts

SAMPLES = Path(hespas.__file__).parent / "samples" / "files"
SOURCE = str(SAMPLES / "mlp_train.mlir")
MODELS = ("Llama-3-8B", "Gemma-2-9B", "Qwen2.5-7B")


def test_the_attacker_names_originals_in_layouts_it_does_not_hold() -> None:
    attacker = Attacker.trained(list(references(MODELS)))
    for model in MODELS:
        victim = training_step(model, *UNSEEN[0])
        assert attacker.ranking(fingerprint(victim))[0][0] == model
        named = Obfuscate(key=Key(b"a key of this test"))(victim, Diagnostics())
        assert attacker.ranking(fingerprint(named))[0][0] == model


def test_similarity_is_one_for_equal_steps_and_symmetric() -> None:
    one, other = (fingerprint(training_step(model, *HELD[0])) for model in MODELS[:2])
    np.testing.assert_allclose(similarity(one, one), np.ones(len(FEATURES)))
    assert (similarity(one, other) < 1).all()
    np.testing.assert_allclose(
        similarity(one, other)[[0, 1, 3, 7, 8]], similarity(other, one)[[0, 1, 3, 7, 8]]
    )


def test_visible_facts_count_the_models_that_agree() -> None:
    original = training_step("Gemma-2-9B", *HELD[0])
    hidden = Obfuscate(key=Key(b"a key of this test"), level="layers")(original, Diagnostics())
    before = {fact.fact: fact for fact in visible_facts(original)}
    after = {fact.fact: fact for fact in visible_facts(hidden)}
    assert 1 <= before["extents of shapes"].models <= 5
    assert before["readable names"].distinct > 100
    assert "extents of shapes" not in after
    assert "readable names" not in after
    assert "readable operations" not in after


def test_readable_workloads_are_refused() -> None:
    with pytest.raises(UsageError, match="no obfuscated names"):
        hespas.privacy(SAMPLES / "pipeline_2x2", SAMPLES / "pipeline_2x2")


def test_the_report_of_a_conversion(tmp_path: Path) -> None:
    run = CliRunner().invoke(
        convert_app,
        [
            str(SAMPLES / "mlp_train.mlir"),
            str(tmp_path / "a.et"),
            "--obfuscate",
            str(tmp_path / "k"),
            "--report",
        ],
    )
    assert run.exit_code == 0, run.output
    assert "extents of shapes" in run.output
    assert "models that agree" in run.output
    wrong = CliRunner().invoke(convert_app, [SOURCE, str(tmp_path / "b.et"), "--obfuscate-level", "layers"])
    assert wrong.exit_code == 2
