"""Reader of files of tensors, and the table of generators of ``python -m tools.synthesis``."""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hespas.graph.errors import FormatError
from tests.generators.test_synth import toy_graphs
from tools.synthesis import main, read_graphs


def written(path: Path, lists: dict[str, list[list[int]]], costs: Sequence[float]) -> Path:
    """Write lists of tensors as ``torch.save`` does, with the operations of pickle protocol 2."""
    rows = [row for values in lists.values() for row in values]
    tensors = iter(range(len(rows)))

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()

    def number(value: int) -> bytes:
        return pickle.BININT + value.to_bytes(4, "little")

    def tensor(count: int) -> bytes:
        storage = (
            pickle.MARK + text("storage") + b"ctorch\nLongStorage\n" + text(str(next(tensors)))
            + text("cpu") + number(count) + pickle.TUPLE + pickle.BINPERSID
        )  # fmt: skip
        hooks = b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
        shape = number(count) + pickle.TUPLE1 + number(1) + pickle.TUPLE1
        arguments = pickle.MARK + storage + number(0) + shape + pickle.NEWFALSE + hooks + pickle.TUPLE
        return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + pickle.REDUCE

    def listed(values: Sequence[bytes]) -> bytes:
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(values) + pickle.APPENDS

    content = b"".join(
        text(name) + listed([tensor(len(row)) for row in rows]) for name, rows in lists.items()
    )
    content += text("y_list") + listed([pickle.dumps(cost, 2)[2:-1] for cost in costs])
    with zipfile.ZipFile(path, "w") as archive:
        program = pickle.PROTO + b"\2" + pickle.EMPTY_DICT + pickle.MARK + content + pickle.SETITEMS + b"."
        archive.writestr("archive/data.pkl", program)
        for key, row in enumerate(rows):
            archive.writestr(f"archive/data/{key}", np.array(row, "<i8").tobytes())
    return path


def test_the_graphs_of_a_file(tmp_path: Path) -> None:
    lists = {"src_list": [[0, 0], [1]], "dst_list": [[1, 2], [0]], "x_n_list": [[7, 8, 9], [3, 4]]}
    first, second = read_graphs(written(tmp_path / "a.pth", lists, [1.5, 2.5]))
    assert first.types.tolist() == [7, 8, 9]
    assert first.edges() == [(0, 1), (0, 2)]
    assert first.cost == 1.5
    assert second.types.tolist() == [4, 3]
    assert second.edges() == [(0, 1)]


@pytest.mark.parametrize("program", [pickle.dumps(print, 2), pickle.dumps(range(3), 2), b"\x80\x02N"])
def test_other_programs_are_not_run(tmp_path: Path, program: bytes) -> None:
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
    with pytest.raises((FormatError, ValueError, TypeError)):
        read_graphs(path)


def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dags = toy_graphs(40)
    lists = {
        "src_list": [dag.sources.tolist() for dag in dags],
        "dst_list": [dag.targets.tolist() for dag in dags],
        "x_n_list": [dag.types.tolist() for dag in dags],
    }
    path = written(tmp_path / "a.pth", lists, [dag.cost for dag in dags])
    monkeypatch.setattr(sys, "argv", ["synthesis", str(path), "--seeds", "1", "--count", "10"])
    main()
    output = capsys.readouterr().out
    assert output.count("| copies | 1.000 (1.000-1.000) |") == 2
    assert "Split by structures" in output
