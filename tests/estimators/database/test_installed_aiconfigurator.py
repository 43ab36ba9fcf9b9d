"""Tables of an installed aiconfigurator, in a synthetic installation of the same layout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.database import Database
from hespas.graph import Diagnostics
from hespas.graph.errors import MissingExtraError, UsageError
from hespas.hardware import load_device
from hespas.operations import Labels, build

H100 = load_device("H100-SXM")


def table(root: Path, place: str, columns: dict[str, object]) -> None:
    path = root / "aiconfigurator_core" / "systems" / "data" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_parquet(path)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that nobody may run: importing it is an error."""
    root = tmp_path / "site"
    (root / "aiconfigurator_core").mkdir(parents=True)
    (root / "aiconfigurator_core" / "__init__.py").write_text("raise RuntimeError('it was run')\n")
    info = root / "aiconfigurator_core-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 9.8.7\n")
    sizes = [2**power for power in range(4, 12)]
    for framework, time_ms in (("trtllm", 0.01), ("vllm", 0.03)):
        table(
            root,
            f"h100_sxm/gemm/{framework}/1.2.3/gemm_perf.parquet",
            {
                "framework": framework.upper(),
                "version": "1.2.3",
                "device": "NVIDIA H100",
                "op_name": "gemm",
                "kernel_source": "torch_flow",
                "gemm_dtype": "bfloat16",
                "m": sizes,
                "n": 1024,
                "k": 512,
                "latency": time_ms,
            },
        )
    table(
        root,
        "h100_sxm/comm/nccl/2.27.3/nccl_perf.parquet",
        {
            "nccl_dtype": "half",
            "num_gpus": 8,
            "message_size": sizes,
            "kernel_source": "NCCL",
            "op_name": "all_gather",
            "latency": [0.001 * place for place in range(1, 9)],
        },
    )
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    yield root
    assert "aiconfigurator_core" not in sys.modules


@pytest.mark.usefixtures("installed")
def test_a_framework_is_chosen_and_named_with_the_release() -> None:
    database = load_estimator("database:path=aiconfigurator,framework=vllm")
    assert isinstance(database, Database)
    diagnostics = Diagnostics()
    ops = build.matmuls(
        Labels.constant("bf16", 1),
        batch=np.ones(1),
        m=np.array([64.0]),
        n=np.array([1024.0]),
        k=np.array([512.0]),
    )
    assert database.predict(ops, H100, diagnostics).duration_ns.tolist() == [pytest.approx(30_000.0)]
    (finding,) = diagnostics
    assert "aiconfigurator-core 9.8.7" in finding.message
    assert "vllm 1.2.3" in finding.message


@pytest.mark.usefixtures("installed")
def test_messages_are_counted_in_elements_and_gathers_by_their_result() -> None:
    # 64 elements of two bytes in all: a shard of 16 bytes for each of the 8 ranks.
    ops = build.collectives(
        Labels.constant("f16", 1),
        op=Labels.constant("all_gather", 1),
        ranks=np.full(1, 8.0),
        message_bytes=np.full(1, 16.0),
        ranks_per_node=np.full(1, 8.0),
    )
    said = Database(path="aiconfigurator").predict(ops, H100)
    assert said.duration_ns.tolist() == [pytest.approx(3_000.0)]


@pytest.mark.usefixtures("installed")
def test_an_unknown_framework_or_device() -> None:
    ops = build.collectives(
        Labels.constant("f16", 1),
        op=Labels.constant("all_gather", 1),
        ranks=np.full(1, 8.0),
        message_bytes=np.full(1, 16.0),
        ranks_per_node=np.full(1, 8.0),
    )
    with pytest.raises(UsageError, match="sglang"):
        Database(path="aiconfigurator", framework="sglang").predict(ops, H100)
    diagnostics = Diagnostics()
    said = Database(path="aiconfigurator").predict(ops, load_device("L4"), diagnostics)
    assert np.isnan(said.duration_ns).all()
    assert diagnostics.counts() == {"database.other-device": 1}


def test_without_an_installation_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)

    def nowhere(name: str) -> None:
        """No such package."""

    monkeypatch.setattr("hespas.estimators.database.model.find_spec", nowhere)
    ops = build.matmuls(
        Labels.constant("bf16", 1), batch=np.ones(1), m=np.ones(1), n=np.ones(1), k=np.ones(1)
    )
    with pytest.raises(MissingExtraError, match="aiconfigurator"):
        Database(path="aiconfigurator").predict(ops, H100)
