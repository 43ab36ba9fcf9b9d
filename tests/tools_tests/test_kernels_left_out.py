"""Held-out recordings: a fit uses nothing of their model or of their device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import tools.kernels
from hespas.fitting.recordings import HeldOutRecording
from hespas.hardware import Device, Fit, load_device
from hespas.measurements import Measurements
from hespas.operations import Labels, build
from tools.kernels import recordings_left_out

H100, A100, MI300X = (load_device(name) for name in ("H100-SXM", "A100-SXM-40GB", "MI300X"))


def recording(name: str, device: Device) -> tuple[Measurements, Device]:
    size = np.full(1, 1024.0)
    ops = build.matmuls(Labels.constant("bf16", 1), batch=np.ones(1), m=size, n=size, k=size)
    table = Measurements(
        name=name,
        provenance="made up",
        ops=ops,
        duration_ns=np.full(1, 1e4),
        spread_ns=np.full(1, np.nan),
        hardware=Labels.constant(device.name, 1),
        split=Labels.constant("", 1),
        recorded=True,
    )
    return table, device


TRACES = [
    recording("h100_bert", H100),
    recording("h100_qwen", H100),
    recording("mi300x_qwen", MI300X),
    recording("a100_dlrm", A100),
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """By recording that is left out, what the fit that speaks of it was made of."""
    found: dict[str, set[str]] = {}
    fitted: list[set[str]] = []

    def fits(
        traces: Sequence[tuple[Measurements, Device]],
        measured: Sequence[tuple[Measurements, Device]],
        device: Device,
        date: str = "",
    ) -> tuple[Fit, ...]:
        fitted.append({table.name for table, _ in traces})
        return ()

    def told(table: Measurements, device: Device, fits: Sequence[Fit]) -> HeldOutRecording:
        found[table.name] = fitted[-1]
        return HeldOutRecording(device.name, table.ops.kind, table.duration_ns, table.duration_ns)

    monkeypatch.setattr(tools.kernels, "_fits", fits)
    monkeypatch.setattr(tools.kernels, "held_out_recording", told)
    return found


def test_of_a_recorded_device_its_other_models_remain(seen: dict[str, set[str]]) -> None:
    recordings_left_out(TRACES, [], devices=False)
    assert seen == {
        "h100_bert": {"h100_qwen", "mi300x_qwen", "a100_dlrm"},
        "h100_qwen": {"h100_bert", "a100_dlrm"},
    }


def test_of_an_unrecorded_device_other_models_on_others_remain(seen: dict[str, set[str]]) -> None:
    recordings_left_out(TRACES, [], devices=True)
    assert seen == {
        "h100_bert": {"mi300x_qwen", "a100_dlrm"},
        "h100_qwen": {"a100_dlrm"},
        "mi300x_qwen": {"h100_bert", "a100_dlrm"},
        "a100_dlrm": {"h100_bert", "h100_qwen", "mi300x_qwen"},
    }


def test_nothing_is_left_out_of_a_single_recording(seen: dict[str, set[str]]) -> None:
    assert recordings_left_out(TRACES[:1], [], devices=True) == []
    assert not seen
