"""Lists of devices, systems, models, estimators and formats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hespas
from hespas.converters import format_names
from hespas.estimators import estimator_names
from hespas.generators.llm import model_names
from hespas.hardware import all_device_names, all_system_names, load_device
from hespas.report import Table


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (hespas.list_devices, all_device_names()),
        (hespas.list_systems, all_system_names()),
        (hespas.list_models, model_names()),
        (hespas.list_estimators, estimator_names()),
        (hespas.list_formats, format_names()),
    ],
)
def test_every_name_in_every_rendering(listed: Callable[[], Table], names: tuple[str, ...]) -> None:
    table = listed()
    assert table.values(table.header[0]) == list(names)
    assert list(table.to_pandas().iloc[:, 0]) == list(names)
    assert table.to_arrow().column(0).to_pylist() == list(names)
    assert repr(table).splitlines() == table.to_text()
    page = table.to_html()
    assert page.count("<tr>") == 1 + min(len(names), 20)
    assert (f"{len(names) - 20} more rows" in page) == (len(names) > 20)


def test_units_of_a_device() -> None:
    row = next(row for row in hespas.list_devices().to_records() if row["device"] == "H100-SXM")
    device = load_device("H100-SXM")
    assert row["flops_per_s"] == 989.4e12
    assert row["memory_bytes_per_s"] == device.main_memory.bandwidth_bytes_per_s
    assert row["memory_bytes"] == device.main_memory.capacity_bytes
    assert row["tdp_w"] == device.tdp_w
