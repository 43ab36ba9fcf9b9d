"""Loop over the cases of a sweep. Each case is saved when it is done; a failed case becomes a record with a
fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import prod
from time import time

from benchmarks.ground_truth.cases import Case, split_of
from benchmarks.ground_truth.measure import measure
from benchmarks.ground_truth.records import Record
from benchmarks.ground_truth.store import Store

__all__ = ["capture", "layouts"]

_LONGEST = 600
_LAYOUT = re.compile(r"entry_computation_layout=\{\((.*?)\)->(.*?)\}(?:, \w+=|\n|$)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)[^}]*\})?")
_MOST_ARRAYS = 8

Say = Callable[[str], None]


def capture(
    cases: Sequence[Case], store: Store, say: Say, *, retry: bool = False, deadline: float = float("inf")
) -> int:
    """Capture the cases that ``store`` does not have. Return the number of cases that are left when
    ``deadline`` (seconds since the epoch) has passed. ``retry`` also captures the cases with a fault again.
    """
    known = {name for name, record in store.records.items() if not (retry and record.fault)}
    waiting = [case for case in cases if case.name not in known]
    for done, case in enumerate(waiting):
        if time() > deadline:
            return len(waiting) - done
        with store.running(case.family, case.name):
            store.keep(*_captured(case, store))
        record = store.records[case.name]
        text = record.fault or record.note or f"{record.latency_ns / 1e3:,.1f} us"
        say(f"{done + 1}/{len(waiting)} {case.name}: {text}")
    return 0


def _captured(case: Case, store: Store) -> tuple[Record, dict[str, bytes]]:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        found = measure(case.name, case.build(), store.repeats, store.machine.backend)
    except Exception as error:
        # Compilers and devices raise errors of any type. An error is a fault of this case only.
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Record(name=case.name, family=case.family, captured=when, fault=text[:_LONGEST]), {}
    shapes, strides = layouts(found.hlo.decode())
    contents = {"stablehlo": found.stablehlo, "hlo": found.hlo, "xplane": found.xplane}
    return Record(
        name=case.name,
        family=case.family,
        columns=dict(case.columns),
        captured=when,
        split=split_of(case.columns),
        shapes=shapes,
        strides=strides,
        device_ns=[round(time_ns, 3) for time_ns in found.device_ns],
        wall_ns=[round(time_ns, 1) for time_ns in found.wall_ns],
        clocks=found.clocks,
        argument_sets=found.sets,
        note=found.note,
    ), contents


def layouts(hlo: str) -> tuple[str, str]:
    """Return types and strides (in elements) of a program's arguments and results, from the first line of its
    HLO text: ``f32[8,16] f32[16,4] -> f32[8,4]`` and ``16,1 4,1 -> 4,1``. Empty for more than eight arrays.
    """
    match = _LAYOUT.search(hlo.partition("\n")[0])
    if match is None:
        return "", ""
    sides = [_ARRAY.findall(side) for side in match.groups()]
    if sum(map(len, sides)) > _MOST_ARRAYS:
        return "", ""
    shapes = " -> ".join(" ".join(f"{dtype}[{extents}]" for dtype, extents, _ in side) for side in sides)
    strides = " -> ".join(" ".join(_strides(extents, order) for _, extents, order in side) for side in sides)
    return shapes, strides


def _strides(extents: str, order: str) -> str:
    """Return strides in elements of an array; ``order`` lists its dimensions from the fastest."""
    shape = [int(extent) for extent in extents.split(",") if extent]
    places = [int(dim) for dim in order.split(",") if dim] or list(reversed(range(len(shape))))
    found = [0] * len(shape)
    for turn, dim in enumerate(places):
        found[dim] = prod(shape[faster] for faster in places[:turn])
    return ",".join(map(str, found)) or "-"
