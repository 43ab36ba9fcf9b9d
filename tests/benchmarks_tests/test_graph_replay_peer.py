"""Recorded replays of CUDA graphs, compared with the tables of TraceLens: links, costs and device time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.graph_replay_peer import compared, main, pairs_in

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "profiles" / "graph_replay"
absent = pytest.mark.skipif(not FOLDER.is_dir(), reason="../shared/data/profiles/graph_replay is not here")
_LEAST_COSTED = {"mi300x_sglang_qwen3-8b_decode": 0.97, "mi300x_vllm_prefilldecode_piecewise": 0.95}
_ROWS = {"mi300x_sglang_qwen3-8b_decode": 5, "mi300x_vllm_prefilldecode_piecewise": 4}


@absent
@pytest.mark.parametrize("name", list(_ROWS))
def test_products_are_those_of_the_peer(name: str) -> None:
    _, replay, captures, peer = next(pair for pair in pairs_in(FOLDER) if pair[0] == name)
    rows, costed, profile = compared(replay, captures, peer)
    assert [row for row in rows if not row.agrees] == []
    assert len(rows) == _ROWS[name]
    assert costed.coverage >= _LEAST_COSTED[name]
    assert float(costed.busy_ns.sum()) == float(profile.duration_ns.sum())


def test_nothing_is_compared_where_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["graph_replay_peer", str(tmp_path)])
    assert main() == 0
    assert "no recordings in" in capsys.readouterr().out
