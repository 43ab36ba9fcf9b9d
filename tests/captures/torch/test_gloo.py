"""A capture in one process equals the calls that the ranks of a real Gloo job dispatch."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hespas.captures.torch import record_rank
from hespas.captures.torch.calls import RankRecording
from hespas.captures.torch.world import ShapeExchange
from hespas.graph.mesh import Mesh
from tests.limits import SAFETY_S

pytest.importorskip("torch", reason="needs the extra 'torch'")

ROOT = Path(__file__).parents[3]
RANKS = 4


def run_job(program: str, mesh: str, folder: Path) -> list[tuple[list[str], list[str]]]:
    """Operations and communication of each rank, as ``tests.captures.torch.gloo_rank`` writes them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    files = [folder / str(rank) for rank in range(RANKS)]
    command = (sys.executable, "-m", "tests.captures.torch.gloo_rank", program, mesh)
    ranks = [
        subprocess.Popen([*command, str(rank), port, str(file)], cwd=ROOT) for rank, file in enumerate(files)
    ]
    try:
        assert [rank.wait(timeout=SAFETY_S) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    texts = [file.read_text(encoding="utf-8").partition("\n\n") for file in files]
    return [(operations.split("\n"), talks.split("\n")) for operations, _, talks in texts]


def record_all(program: str, mesh: Mesh) -> list[RankRecording]:
    from fixtures.make.torch_programs import PROGRAMS

    board = ShapeExchange()

    def run(rank: int) -> RankRecording:
        with board.on(rank):
            return record_rank(PROGRAMS[program], mesh, rank)

    return [board.run_in_order(rank, run)[rank] for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("program", "mesh"),
    [
        ("gpt", "data=2,model=2"),
        ("gpt", "data=4"),
        ("resnet", "data=4"),
        ("moe", "expert=4"),
        ("pipeline", "pipe=4"),
    ],
)
def test_all_ranks_dispatch_what_was_recorded(program: str, mesh: str, tmp_path: Path) -> None:
    from tests.captures.torch.gloo_rank import call_lines, communication_lines

    recorded = record_all(program, Mesh.of(mesh))
    for rank, (operations, talks) in enumerate(run_job(program, mesh, tmp_path)):
        recording = recorded[rank]
        assert communication_lines(recording) == talks
        real, alone = Counter(operations), Counter(call_lines(recording))
        assert not alone - real
        # Gloo scatters by reducing all and copying its part, while the program waits for it.
        scattered = sum("_reduce_scatter_base_" in line for line in talks)
        assert Counter(line.split()[0] for line in (real - alone).elements()) == Counter(
            {"aten::split": scattered, "aten::copy_": scattered} if scattered else {}
        )
