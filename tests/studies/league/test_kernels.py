"""Settings of kernels and host in rows, and the systems of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hespas.estimators.configuration import host_issue_ns, training_estimator
from hespas.estimators.interface import Estimator
from hespas.estimators.training import Training as TrainingKernels
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.published import PublishedRun, run_of
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError
from hespas.hardware import Device, load_device
from hespas.studies.league.runs import system_of


def run(layout: Layout | None = None, **cells: str) -> PublishedRun:
    """Return a run with these cells."""
    row = {"accelerator": "H100-SXM", "model": "Llama-3-8B", "seq_len": "4096", "num_accelerators": "8"}
    found = run_of({**row, "global_batch": "8", **cells}, "here", Diagnostics())
    return found if layout is None else replace(found, layout=layout)


def estimator_of(found: PublishedRun, device: Device, base: str) -> Estimator:
    return training_estimator(found.facts(device), device, base, found.layout.ranks)


def issue_ns(found: PublishedRun, device: Device) -> float:
    return host_issue_ns(found.facts(device), device)


def test_a_power_limit_and_another_memory_are_options() -> None:
    device = load_device("H100-SXM")
    row = run(power_limit_w="500", memory_bandwidth_gb_per_s="2400")
    found = estimator_of(row, device, "composite")
    assert isinstance(found, TrainingKernels)
    assert found.power_w == 500.0
    assert found.bandwidth == pytest.approx(2.4 / 3.35)
    text = run(accelerator_variant="2.4 TB/s, 500 W power limit", notes="cuda graphs")
    plain = estimator_of(text, device, "composite")
    assert plain == TrainingKernels(attention="cudnn", num_ranks=8)


def test_what_an_estimator_states_itself_stays() -> None:
    found = estimator_of(run(), load_device("H100-SXM"), "training:attention=flash1,base=roofline")
    assert found == TrainingKernels(attention="flash1", base="roofline", num_ranks=8)


@pytest.mark.parametrize(
    ("accelerator", "framework", "library"),
    [
        ("H100-SXM", "Megatron-Bridge (NeMo 25.09)", "cudnn"),
        ("A100-SXM-80GB", "Megatron-LM (2021-04)", "measured"),
        ("H100-SXM", "llm-foundry/Composer (PyTorch FSDP)", "flash1"),
        ("MI300X", "PyTorch", "measured"),
        ("TPU-v5e", "MaxText (JAX)", "splash"),
    ],
)
def test_whose_attention_runs(accelerator: str, framework: str, library: str) -> None:
    found = run(accelerator=accelerator, framework=framework)
    model = estimator_of(found, load_device(accelerator), "composite")
    assert isinstance(model, TrainingKernels)
    assert model.attention == library


def test_graphs_and_programs_take_no_time_of_the_host() -> None:
    device = load_device("H100-SXM")
    times = [issue_ns(run(cuda_graphs=graphs), device) for graphs in ("", "none", "all")]
    assert times[0] == times[1] > times[2] == 0.0
    partly = issue_ns(run(cuda_graphs="parts"), device)
    assert 0.0 < partly < times[0]
    assert issue_ns(run(), load_device("TPU-v5e")) == issue_ns(run(framework="MaxText"), device) == 0.0


@pytest.mark.parametrize(
    ("accelerator", "ranks", "shape"),
    [
        ("H100-SXM", 64, (8, 8)),
        ("GB200", 256, (64, 4)),
        ("GB200", 64, (64, 1)),
        ("GB200", 144, (72, 2)),
        ("TPU-v5e", 1024, (16, 16, 4)),
        ("MI355X", 64, (8, 8)),
        ("L40S", 16, (8, 2)),
    ],
)
def test_ranks_fill_systems_evenly(accelerator: str, ranks: int, shape: tuple[int, ...]) -> None:
    found = system_of(run(Layout(dp=ranks), accelerator=accelerator), None, load_device(accelerator))
    assert found.shape == shape
    assert found.devices == ranks


def test_nodes_of_fewer_devices_than_the_system_has() -> None:
    for text in ("4", "4.0"):
        row = run(Layout(dp=16), gpus_per_node=text)
        assert system_of(row, None, load_device("H100-SXM")).shape == (4, 4)


@pytest.mark.parametrize("text", ["0", "-4", "4.5", "nan", "inf", "1e400", "four"])
def test_devices_of_a_node_that_are_no_count(text: str) -> None:
    with pytest.raises(FormatError, match="is not a number of devices"):
        system_of(run(Layout(dp=16), gpus_per_node=text), None, load_device("H100-SXM"))
