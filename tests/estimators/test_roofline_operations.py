"""Roofline times of operations outside of graphs, by hand."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest
from msgspec import structs

from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics
from hespas.hardware import Device, Efficiency, load_device
from hespas.operations import Labels, Operations, build

H100 = load_device("H100-SXM")
LAUNCH = H100.launch_overhead_ns
PEAK = 989.4e12
BANDWIDTH = H100.main_memory.bandwidth_bytes_per_s
WITHOUT_LATENCY = replace(H100, links=tuple(structs.replace(link, latency_ns=0.0) for link in H100.links))


def matmuls(*sizes: float, scheme: str = "bf16") -> Operations:
    """Square products."""
    count = len(sizes)
    size = np.array(sizes, np.float64)
    return build.matmuls(Labels.constant(scheme, count), batch=np.ones(count), m=size, n=size, k=size)


def collectives(*names: str, ranks: float = 8, per_node: float = 8, payload: float = 64e6) -> Operations:
    count = len(names)
    return build.collectives(
        Labels.constant("bf16", count),
        op=Labels.of(names),
        ranks=np.full(count, ranks),
        message_bytes=np.full(count, payload),
        ranks_per_node=np.full(count, per_node),
    )


def times(ops: Operations, model: Roofline | None = None, device: Device = H100) -> list[float]:
    found: list[float] = (model or Roofline()).predict(ops, device).duration_ns.tolist()
    return found


def fitted(op_class: str, compute: float, memory: float, t0_ns: float) -> Device:
    fit = Efficiency(
        op_class=op_class, dtype="bf16", compute=compute, memory=memory, t0_ns=t0_ns, provenance="test"
    )
    return replace(H100, efficiencies=(fit,))


def test_the_longer_of_arithmetic_and_traffic() -> None:
    """3 x 2 bytes per element of a small product, 2 FLOPs per element and step of a large one."""
    arithmetic, traffic = 2 * 8192**3 / PEAK * 1e9, 3 * 2 * 256**2 / BANDWIDTH * 1e9
    assert times(matmuls(8192, 256)) == pytest.approx([LAUNCH + arithmetic, LAUNCH + traffic])
    shares = Roofline(compute_efficiency=0.5, memory_efficiency=0.25)
    assert times(matmuls(8192, 256), shares) == pytest.approx([LAUNCH + 2 * arithmetic, LAUNCH + 4 * traffic])


def test_fits_of_a_kind_and_a_number_format() -> None:
    """Unknown figures of a fit leave the options. Fits of other kinds and formats do not apply."""
    arithmetic, traffic = 2 * 8192**3 / PEAK * 1e9, 3 * 2 * 256**2 / BANDWIDTH * 1e9
    whole = fitted("contraction", 0.4, 0.8, 5000.0)
    assert times(matmuls(8192, 256), device=whole) == pytest.approx(
        [5000 + arithmetic / 0.4, 5000 + traffic / 0.8]
    )
    part = fitted("contraction", nan, 0.8, nan)
    halves = Roofline(compute_efficiency=0.5, memory_efficiency=0.5)
    assert times(matmuls(8192, 256), halves, part) == pytest.approx(
        [LAUNCH + arithmetic / 0.5, LAUNCH + traffic / 0.8]
    )
    other = fitted("elementwise", 0.4, 0.8, 5000.0)
    assert times(matmuls(8192, 256), device=other) == times(matmuls(8192, 256))
    assert times(matmuls(8192, scheme="f16"), device=whole) == times(matmuls(8192, scheme="f16"))


def test_collectives() -> None:
    """All-reduces send 2 x 7/8 of the buffer, all-gathers 7 shards; unknown collectives have no time."""
    link = H100.link("scale_up")
    assert link is not None
    sent = np.array([2 * 7 / 8, 7.0]) * 64e6 / link.bandwidth_bytes_per_s * 1e9
    found = times(collectives("all_reduce", "all_gather", "no such collective"), device=WITHOUT_LATENCY)
    assert found == pytest.approx([*(LAUNCH + sent), nan], nan_ok=True)


def test_collectives_beyond_a_node_use_its_network() -> None:
    inside, outside = H100.link("scale_up"), H100.link("scale_out")
    assert inside is not None
    assert outside is not None
    for per_node, link in ((8.0, inside), (4.0, outside), (nan, inside)):
        sent = 2 * 7 / 8 * 64e6 / link.bandwidth_bytes_per_s * 1e9
        assert times(collectives("all_reduce", per_node=per_node), device=WITHOUT_LATENCY) == pytest.approx(
            [LAUNCH + sent]
        )


def test_operations_without_a_time_are_counted() -> None:
    findings = Diagnostics()
    ops = collectives("all_reduce", "no such collective", "nor this one")
    Roofline().predict(ops, H100, findings)
    assert findings.counts() == {"roofline.unknown": 2}
    assert times(matmuls(nan)) == pytest.approx([nan], nan_ok=True)
