"""Rules of the reader one by one: nesting, runs and names."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.converters.xplane.collect import nest
from hespas.converters.xplane.lines import ABSENT, LineKind, Truth, line_kind, split_module_name, truth_of
from hespas.converters.xplane.profile import Modules, run_numbers
from hespas.converters.xplane.space import to_integer
from hespas.graph.columns import IntArray


def ints(*values: int) -> IntArray:
    return np.array(values, np.int64)


def test_time_inside_is_taken_from_the_innermost_that_encloses_it() -> None:
    # a loop, a call in it, two operations in that, a host annotation around one of them, one behind the loop
    start, duration = ints(0, 10, 12, 30, 11, 100), ints(100, 50, 8, 20, 10, 5)
    is_device = np.array([True, True, True, True, False, True])
    found = nest(start, duration, is_device)
    assert found.device.tolist() == [-1, 0, 1, 1, 1, -1]
    assert found.host.tolist() == [-1, -1, 4, -1, -1, -1]
    assert found.exclusive_ps.tolist() == [50, 22, 8, 20, 10, 5]
    assert int(found.exclusive_ps[is_device].sum()) == 105
    assert found.overlapping == 0


def test_what_reaches_beyond_the_end_of_another_is_not_inside_it() -> None:
    found = nest(ints(0, 5, 6), ints(10, 10, 2), np.ones(3, np.bool_))
    assert found.device.tolist() == [-1, -1, 1]
    assert found.exclusive_ps.tolist() == [10, 8, 2]
    assert found.overlapping == 1


def test_neighbours_and_moments_do_not_enclose() -> None:
    found = nest(ints(0, 10, 10, 20), ints(10, 10, 0, 0), np.ones(4, np.bool_))
    assert found.exclusive_ps.tolist() == [10, 10, 0, 0]
    assert found.device.tolist() == [-1, -1, 1, -1]


def test_runs_are_numbered_in_time_and_alike_on_all_ranks_that_share_their_ids() -> None:
    module, rank = ints(1, 1, 1, 1, 2), ints(0, 0, 1, 1, 0)
    shared = run_numbers(module, ints(3, 3, 3, 3, 3), rank, ints(70, 50, 70, 50, 50), ints(0, 10, 11, 21, 5))
    assert shared.tolist() == [0, 1, 0, 1, 0]
    own = run_numbers(module, ints(3, 3, 3, 3, 3), rank, ints(1, 2, 3, 4, 9), ints(0, 10, 1, 11, 5))
    assert own.tolist() == [0, 1, 0, 1, 0]


def test_runs_without_ids_are_counted_by_what_a_program_repeats_least() -> None:
    ops = ints(1, 2, 2, 3, 1, 2, 2, 3)
    absent = np.full(8, ABSENT)
    numbers = run_numbers(np.ones(8, np.int64), ops, np.zeros(8, np.int64), absent, np.arange(8))
    assert numbers.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    nothing = run_numbers(np.zeros(8, np.int64), ops, np.zeros(8, np.int64), absent, np.arange(8))
    assert set(nothing.tolist()) == {-1}


def test_programs_are_called_by_name_and_by_id_where_that_is_not_enough() -> None:
    modules = Modules.of([("jit_f", 3), ("jit_f", -2), ("jit_g", 4), ("jit_g", -1)])
    assert modules.label("jit_f", 3) == "jit_f(3)"
    assert modules.label("jit_f", -2) == f"jit_f({(1 << 64) - 2})"
    assert modules.label("jit_f", -1) == "jit_f"
    assert modules.label("jit_g", 4) == "jit_g"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("jit_f(12)", ("jit_f", 12)),
        ("jit_f(18446744073709551614)", ("jit_f", -2)),
        ("jit_f(-2)", ("jit_f", -2)),
        ("jit_f", ("jit_f", -1)),
        ("jit(f)(x)", ("jit(f)(x)", -1)),
        ("jit_f()", ("jit_f()", -1)),
        ("jit_f(--2)", ("jit_f(--2)", -1)),
    ],
)
def test_names_of_programs_are_split_from_ids(text: str, expected: tuple[str, int]) -> None:
    assert split_module_name(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", 12), (" -7 ", -7), ("18446744073709551615", -1), ("x", ABSENT), ("", ABSENT), ("9" * 30, ABSENT),
     ("--1", ABSENT), ("\u0662", 2)],
)  # fmt: skip
def test_numbers_in_texts(text: str, expected: int) -> None:
    assert to_integer(text) == expected


def test_which_lines_count() -> None:
    gpu = ["Stream #3(Kernel)", "XLA Modules", "Steps", "XLA Ops", "TensorFlow Ops", "TensorFlow Name Scope",
           "XLA Ops - from #3", "XLA Modules - from #3", "Something new"]  # fmt: skip
    truth = truth_of("/device:GPU:0", gpu)
    kinds = [line_kind("/device:GPU:0", name, truth) for name in gpu]
    assert kinds == [LineKind.STREAM, LineKind.MODULES, *[LineKind.OTHER] * 7]
    tpu = ["XLA Ops", "Async XLA Ops", "Something new"]
    truth = truth_of("/device:TPU:0", tpu)
    kinds = [line_kind("/device:TPU:0", name, truth) for name in tpu]
    assert kinds == [LineKind.OPS, LineKind.OTHER, LineKind.OTHER]
    assert truth_of("/device:CUSTOM:0", ["queue 0"]) is Truth.ALL
    assert line_kind("/device:CUSTOM:0", "queue 0", Truth.ALL) is LineKind.STREAM
    assert line_kind("/host:CPU", "python", Truth.ALL) is LineKind.HOST
    assert line_kind("/host:metadata", "", Truth.ALL) is LineKind.OTHER
    assert line_kind("Syscalls", "", Truth.ALL) is LineKind.OTHER
