"""The open trace set: thirty workloads, each with traces, an obfuscated variant and a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hespas
from tools.open_set import SET, main


def test_the_set_has_thirty_workloads_of_every_kind() -> None:
    assert len({entry.name for entry in SET}) == 30
    assert {entry.kind for entry in SET} >= {"dense", "mixture of experts", "serving", "captured"}
    ranks = [entry.settings.get("dp", 1) * entry.settings.get("tp", 1) * entry.settings.get("pp", 1)
             for entry in SET]  # fmt: skip
    assert max(ranks) == 65_536


def test_traces_variants_and_cards(tmp_path: Path) -> None:
    names = ["dlrm-8", "captured-moe-8", "dit-64-fsdp"]
    main([str(tmp_path), "--only", *names])
    cards = json.loads((tmp_path / "cards.json").read_text())
    assert [card["name"] for card in cards] == ["dlrm-8", "dit-64-fsdp", "captured-moe-8"]
    for card in cards:
        folder = tmp_path / card["name"]
        assert json.loads((folder / "card.json").read_text()) == card
        assert card["errors_of_the_checker"] == 0
        assert min(card["step_ns"].values()) > 0
        assert hespas.check(folder / "hidden", profile="chakra").valid
        assert len(list((folder / "traces").glob("*.et"))) == (8 if card["ranks"] == 8 else 1)
    with pytest.raises(SystemExit, match="no workload 'other'"):
        main([str(tmp_path), "--only", "other"])
