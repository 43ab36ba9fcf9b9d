"""Schedules by hand, and random ones compared with a slow scheduler that applies the rules literally."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import RaggedArray, Timeline, Workload
from hespas.graph.errors import FormatError, UsageError
from hespas.simulator import ListScheduler, Simulation, simulate
from hespas.simulator.schedule import PRIORITIES, Priority, Tasks, list_schedule
from hespas.simulator.streams import COMMUNICATION, COMPUTE, COPY, FREE, HOST, STREAMS
from tests.simulator.small_programs import Sketch


def run(sketch: Sketch, priority: Priority = "program") -> Simulation:
    return simulate(Workload.spmd(sketch.build(), 1), simulator=ListScheduler(priority=priority))


def spans(timeline: Timeline) -> dict[int, tuple[str, float, float]]:
    """Resource, start and end of each node."""
    rows = zip(
        timeline.node.tolist(),
        timeline.resource.tolist(),
        timeline.start_ns.tolist(),
        timeline.end_ns.tolist(),
        strict=True,
    )
    return {node: (timeline.resources[resource], start, end) for node, resource, start, end in rows}


def critical_nodes(timeline: Timeline) -> list[int]:
    nodes: list[int] = timeline.node[timeline.critical].tolist()
    return nodes


# --- by hand


def test_communication_hides_behind_what_does_not_need_it() -> None:
    s = Sketch()
    a = s.add("compute", 10)
    gather = s.add("comm", 25, a)
    b = s.add("compute", 5, a)
    c = s.add("product", 4, gather, b)
    done = run(s)
    assert spans(done.timeline) == {
        a: ("compute", 0, 10),
        gather: ("communication", 10, 35),
        b: ("compute", 10, 15),
        c: ("compute", 35, 39),
    }
    [found] = done.classes
    assert (done.step_ns, found.exposed_comm_ns) == (39, 20)
    assert found.busy_ns == {"compute": 19, "communication": 25, "copy": 0, "host": 0}
    assert critical_nodes(done.timeline) == [a, gather, c]
    assert found.critical_path.class_ns == {"collective": 25, "elementwise": 10, "contraction": 4}
    assert found.critical_path.resource_ns == {"compute": 14, "communication": 25, "copy": 0, "host": 0}
    assert (found.critical_path.spans, found.critical_path.after_resource) == (3, 0)


def test_a_busy_stream_is_a_cause_too() -> None:
    s = Sketch()
    first = s.add("comm", 7)
    second = s.add("comm", 5)
    last = s.add("compute", 1, second)
    timeline = run(s).timeline
    assert timeline.node.tolist() == [first, second, last]
    assert timeline.cause.tolist() == [-1, 0, 1]
    assert timeline.by_resource.tolist() == [False, True, False]
    assert critical_nodes(timeline) == [first, second, last]


def test_each_kind_of_work_has_its_stream() -> None:
    s = Sketch()
    on = {
        "compute": ("compute", "product"),
        "communication": ("comm", "send", "recv", "permute"),
        "copy": ("copy", "load", "store", "host send"),
        "host": ("host",),
    }
    expected = {s.add(what, 3): stream for stream, kinds in on.items() for what in kinds}
    assert {node: row[0] for node, row in spans(run(s).timeline).items()} == expected


def test_the_host_is_the_device_where_the_device_does_nothing() -> None:
    s = Sketch()
    a = s.add("host", 5)
    s.add("comm", 20, a)
    s.add("host", 8, a)
    [found] = run(s).classes
    assert found.busy_ns == {"compute": 13, "communication": 20, "copy": 0, "host": 0}
    assert found.exposed_comm_ns == 12


def test_free_nodes_take_no_time_and_no_stream_and_pass_causes_on() -> None:
    s = Sketch()
    a = s.add("compute", 10)
    busy = s.add("compute", 10)
    view = s.add("free", float("nan"), a)
    start = s.add("metadata", float("nan"), view)
    b = s.add("comm", 3, start)
    timeline = run(s).timeline
    assert spans(timeline) == {
        a: ("compute", 0, 10),
        busy: ("compute", 10, 20),
        b: ("communication", 10, 13),
    }
    assert timeline.cause[timeline.node == b].tolist() == [int(np.flatnonzero(timeline.node == a)[0])]


def test_control_dependencies_are_kept() -> None:
    s = Sketch()
    a = s.add("comm", 10)
    b = s.add("compute", 1, control=[a])
    assert spans(run(s).timeline)[b] == ("compute", 10, 11)


def test_nodes_not_in_order_of_their_dependencies() -> None:
    s = Sketch()
    late = s.add("compute", 1, 1)
    early = s.add("compute", 4)
    assert spans(run(s).timeline) == {late: ("compute", 4, 5), early: ("compute", 0, 4)}


def test_priorities() -> None:
    s = Sketch()
    short = s.add("compute", 2)
    head = s.add("compute", 2)
    tail = s.add("comm", 10, head)
    assert spans(run(s).timeline)[tail] == ("communication", 4, 14)
    assert spans(run(s, "critical-path").timeline)[tail] == ("communication", 2, 12)
    assert spans(run(s, "critical-path").timeline)[short] == ("compute", 2, 4)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match="`priority=fifo`"):
        ListScheduler(priority="fifo")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="max_executions"):
        ListScheduler(max_executions=0)


@pytest.mark.parametrize("priority", PRIORITIES)
def test_a_cycle_is_an_error(priority: Priority) -> None:
    s = Sketch()
    s.add("compute", 1)
    s.add("compute", 1, 2)
    s.add("compute", 1, 1)
    with pytest.raises(FormatError, match="cycle"):
        run(s, priority)


def test_durations_lost_in_rounding_make_no_endless_path() -> None:
    s = Sketch()
    last = s.add("compute", 1.0)
    for _ in range(6):
        last = s.add("compute", 1e-300, last)
    other = s.add("compute", 1e-300)
    done = run(s)
    assert done.step_ns == 1.0
    assert done.classes[0].critical_path.class_ns == {"elementwise": pytest.approx(1.0)}
    assert other in spans(done.timeline)


def test_an_empty_program_takes_no_time() -> None:
    done = run(Sketch())
    assert (done.step_ns, len(done.timeline)) == (0.0, 0)
    assert done.classes[0].critical_path.spans == 0


# --- against a slow scheduler


class Case(NamedTuple):
    durations: list[int]
    streams: list[int]
    deps: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 14))
    streams = draw(
        st.lists(
            st.sampled_from((FREE, COMPUTE, COMPUTE, COMMUNICATION, COPY, HOST)),
            min_size=count,
            max_size=count,
        )
    )
    lengths = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    deps: list[list[int]] = [[] for _ in range(count)]
    for place, task in enumerate(order):
        before = order[:place]
        deps[task] = draw(st.lists(st.sampled_from(before), max_size=3, unique=True)) if before else []
    durations = [0 if stream == FREE else length for stream, length in zip(streams, lengths, strict=True)]
    return Case(durations, streams, deps)


def tasks_of(case: Case) -> Tasks:
    return Tasks(
        "case",
        np.array(case.durations, float),
        np.array(case.streams, np.int32),
        RaggedArray.from_lists(case.deps),
    )


def chain_from(case: Case, task: int) -> int:
    """The longest chain of work that starts with a task."""
    behind = [chain_from(case, other) for other, deps in enumerate(case.deps) if task in deps]
    return case.durations[task] + max(behind, default=0)


def slow_starts(case: Case, priority: Priority) -> list[int]:
    """Moment after moment: what ends ends, what is free ends at once, idle streams take the first ready."""
    count = len(case.streams)
    keys = [(-chain_from(case, task) if priority == "critical-path" else 0, task) for task in range(count)]
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    now = 0
    while len(start) < count:
        ended = {task for task, at in end.items() if at <= now}
        ready = [t for t in range(count) if t not in start and ended.issuperset(case.deps[t])]
        free = [task for task in ready if case.streams[task] == FREE]
        for task in free:
            start[task] = end[task] = now
        if free:
            continue
        for stream in range(len(STREAMS)):
            busy = any(case.streams[task] == stream and start[task] <= now < end[task] for task in start)
            mine = sorted((task for task in ready if case.streams[task] == stream), key=lambda t: keys[t])
            if mine and not busy:
                start[mine[0]], end[mine[0]] = now, now + case.durations[mine[0]]
        now += 1
    return [start[task] for task in range(count)]


@given(cases(), st.sampled_from(PRIORITIES))
def test_it_schedules_as_the_slow_one_does(case: Case, priority: Priority) -> None:
    assert list_schedule(tasks_of(case), priority).start_ns.tolist() == slow_starts(case, priority)


def is_reached(case: Case, task: int, cause: int) -> bool:
    """Return True if a task waits for another, directly or through zero-cost tasks."""
    return any(
        dep == cause or (case.streams[dep] == FREE and is_reached(case, dep, cause))
        for dep in case.deps[task]
    )


@given(cases(), st.sampled_from(PRIORITIES))
def test_every_start_has_a_cause_that_ends_there(case: Case, priority: Priority) -> None:
    schedule = list_schedule(tasks_of(case), priority)
    for task, cause in enumerate(schedule.cause.tolist()):
        if cause < 0:
            assert schedule.start_ns[task] == 0
            continue
        assert schedule.end_ns[cause] == schedule.start_ns[task]
        assert case.streams[cause] != FREE
        if schedule.by_resource[task]:
            assert case.streams[cause] == case.streams[task]
        else:
            assert is_reached(case, task, cause)
    path = schedule.critical()
    nodes: list[int] = path.tolist()
    assert sum(case.durations[task] for task in nodes) == schedule.finish_ns
    assert schedule.end_ns[path[-1]] == schedule.finish_ns


_NAMES = {COMPUTE: "compute", COMMUNICATION: "comm", COPY: "copy", HOST: "host", FREE: "free"}


@given(cases())
def test_figures_are_those_counted_moment_by_moment(case: Case) -> None:
    if COMPUTE not in case.streams:
        case.streams[0], case.durations[0] = COMPUTE, 1
    s = Sketch()
    for stream, length, deps in zip(case.streams, case.durations, case.deps, strict=True):
        s.add(_NAMES[stream], length if stream != FREE else float("nan"), *deps)
    done = run(s)
    [found] = done.classes
    running = [{row[0] for row in spans(done.timeline).values() if row[1] <= t < row[2]} for t in range(200)]
    exposed = sum("communication" in now and "compute" not in now for now in running)
    assert found.exposed_comm_ns == exposed
    assert found.busy_ns == {name: sum(name in now for now in running) for name in STREAMS}
    assert sum(found.critical_path.class_ns.values()) == pytest.approx(done.step_ns)
    assert sum(found.critical_path.resource_ns.values()) == pytest.approx(done.step_ns)
    assert max((end for _, _, end in spans(done.timeline).values()), default=0) == done.step_ns
