"""Law of formats: a writer writes or rejects each input that a reader accepts, and written files read back.

Fields of documents and of the values of the hub are changed, not bytes: what results is mostly well-formed
and says something odd. Whatever a reader takes from it goes through every writer and back, and through what
commands do with a workload.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, cast

import numpy as np

from hespas.api import estimate, simulate, view
from hespas.converters import ReadOptions, WriteOptions, is_flat, load_format
from hespas.graph import Diagnostics, OpGraph, StringTable, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import HespasError, InvariantError
from hespas.graph.passes import FoldFree, UnrollLoops
from hespas.validators.checker import check_workload
from hespas.validators.roundtrip.columns import compare_columns
from hespas.validators.roundtrip.matrix import unreported
from hespas.validators.roundtrip.pairs import FormatPair, PairStatus, TripRunner
from tests.fuzzing.stages import DEVICES, ESTIMATORS

__all__ = [
    "WRITTEN",
    "broken_laws",
    "document_of",
    "flattened",
    "mutated_document",
    "mutated_workload",
    "places",
    "read_document",
    "read_strictly",
    "used",
]

WRITTEN = ("op-graph", "op-graph-arrow", "chakra", "chakra-json")
"""Formats that are quick to write; StableHLO parses what it writes."""

_NUMBERS = (
    0, 1, 2, 3, 7, -1, -2, 127, 128, 255, 256, 65_535, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, 0.5, 1e-300, 1e18, 1e300, -0.0, -1.5,
)  # fmt: skip
_TEXTS = (
    "", "a", "0", "1", "inf", "-inf", "?", "?[?]", "f32[]", "f32[0]", "f32[2,3]", "bf16[<=8]", "f32[?,8]#1",
    "add", "all_reduce", "collective", "send", "recv", "permute", "compute", "metadata", "mem_load", "host",
    "loop_body", "branch", "call", "[1,4]<=[4]", "[2,2]<=[2,2]T(1,0)", "[1,1]<=[1]", "[1,2]<=[2]+2", "\x00",
    "\x00gA==", "\u00e9\U0001f600", "x" * 300, "a\nb", "stablehlo.dot_general", "w.3", "../up", "a/b",
    "pg_name", "comm_type", "rank", "num_ranks", "comm_group", "schema",
)  # fmt: skip
_FLOATS = (np.nan, np.inf, -np.inf, -1.0, -0.0, 0.0, 0.5, 1e308, 2.0**63, 5e-324, 2.0**53 + 2)

Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
Place: TypeAlias = tuple["dict[Any, Json]", Any]
"""A container and a key of it; a list is taken for a mapping from its places."""
_Column: TypeAlias = "np.ndarray[tuple[int], np.dtype[Any]]"

_CONTAINERS: tuple[Callable[[], Json], ...] = (
    list,
    dict,
    lambda: [0],
    lambda: [[0, 1]],
    lambda: [[1, 0], [0, 1]],
)


def places(document: Json) -> list[Place]:
    """Every place of a document."""
    found: list[Place] = []
    stack = [document]
    while stack:
        current = stack.pop()
        if isinstance(current, dict | list):
            keys: list[Any] = list(current) if isinstance(current, dict) else list(range(len(current)))
            holder = cast("dict[Any, Json]", current)
            found.extend((holder, key) for key in keys)
            stack.extend(holder[key] for key in keys)
    return found


def _copied(document: Json) -> Json:
    return cast("Json", json.loads(json.dumps(document)))


def _odd(rng: Random, like: Json) -> Json:
    """A value for a place, mostly of the type of what stands there."""
    if rng.random() < 0.05:
        return rng.choice((None, True, False, rng.choice(_CONTAINERS)()))
    if isinstance(like, bool):
        return not like
    if isinstance(like, int | float):
        return rng.choice((like + 1, like - 1, rng.choice(_NUMBERS), rng.choice(_NUMBERS[:8])))
    if isinstance(like, str):
        return rng.choice((rng.choice(_TEXTS), str(rng.choice(_NUMBERS)), like + rng.choice(_TEXTS)))
    return rng.choice((None, *(make() for make in _CONTAINERS)))


def mutated_document(document: Json, rng: Random, others: Sequence[Place]) -> Json:
    """A copy with one to four changes: values replaced, taken from elsewhere or dropped, items repeated or
    moved, fields added that stand in ``others``.
    """
    copy = _copied(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        found = places(copy)
        if not found:
            return copy
        holder, key = rng.choice(found)
        action = rng.randrange(10)
        if action < 5:
            holder[key] = _odd(rng, holder[key])
        elif action == 5:
            del holder[key]
        elif action == 6 and not isinstance(key, str):
            cast("list[Json]", holder).insert(key, _copied(holder[key]))
        elif action == 7:
            alike = [place for place in found if type(place[0][place[1]]) is type(holder[key])]
            other, place = rng.choice(alike)
            holder[key] = _copied(other[place])
        elif action == 8 and not isinstance(key, str):
            cast("list[Json]", holder).append(holder.pop(key))
        else:
            source, name = rng.choice(others)
            objects = [place[0] for place in found if isinstance(place[1], str)]
            rng.choice(objects)[name] = _copied(source[name])
    return copy


def mutated_workload(workload: Workload, rng: Random) -> Workload | None:
    """The workload with some entries of some columns of a class changed; None where it cannot be made."""
    index = rng.randrange(len(workload.classes))
    graph = workload.classes[index]
    try:
        for _ in range(rng.choice((1, 1, 2, 3))):
            graph = _mutated_graph(graph, rng)
        return replace(workload, classes=(*workload.classes[:index], graph, *workload.classes[index + 1 :]))
    except InvariantError:
        return None


def _mutated_graph(graph: OpGraph, rng: Random) -> OpGraph:
    name = rng.choice([entry.name for entry in fields(graph)])
    value: Any = getattr(graph, name)
    if isinstance(value, np.ndarray):
        return replace(graph, **cast("Any", {name: _mutated_column(cast("_Column", value), rng)}))
    if not hasattr(value, "__dataclass_fields__") or isinstance(value, StringTable):
        return graph
    columns: dict[str, Any] = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    part = rng.choice(list(columns))
    if not isinstance(columns[part], np.ndarray) or "offsets" in part:
        return graph
    changed: dict[str, Any] = {part: _mutated_column(columns[part], rng)}
    lengths = {len(column) for column in columns.values()}
    is_ragged = any("offsets" in key for key in columns)  # whose offsets only rise
    if rng.random() < 0.2 and len(lengths) == 1 and not is_ragged and (count := lengths.pop()):
        rows = np.array([rng.randrange(count) for _ in range(count)])  # left out, twice, in another order
        changed = {key: column[rows] for key, column in columns.items()}
    return replace(graph, **cast("Any", {name: replace(value, **changed)}))


def _mutated_column(column: _Column, rng: Random) -> _Column:
    if not len(column):
        return column
    changed = column.copy()
    row = rng.randrange(len(changed))
    if changed.dtype.kind == "b":
        changed[row] = not changed[row]
    elif changed.dtype.kind == "f":
        changed[row] = rng.choice(_FLOATS)
    else:
        low, high = int(np.iinfo(changed.dtype).min), int(np.iinfo(changed.dtype).max)
        now = int(changed[row])
        chosen = int(rng.choice((0, 1, 2, -1, low, high, now + 1, now - 1, *_NUMBERS[:9])))
        changed[row] = min(max(chosen, low), high)
    return changed


def flattened(workload: Workload) -> Workload:
    """The workload as a conversion gives it to a format without loops."""
    fold, unroll, found = FoldFree(), UnrollLoops(unknown_trips=1), Diagnostics()
    return replace(workload, classes=tuple(unroll(fold(graph, found), found) for graph in workload.classes))


def document_of(workload: Workload, name: str, folder: Path) -> Json:
    """The workload as a document of a JSON format; its first rank where that has a file per rank."""
    form = load_format(name)
    assert form.write is not None
    path = folder / "seed.json"
    first = int(workload.present[0])
    ranks = range(first, first + 1) if form.flat else None
    form.write(workload, path, WriteOptions(name=path.name, ranks=ranks), Diagnostics())
    document = cast("Json", json.loads(path.read_text()))
    path.unlink()
    return document


def read_document(document: Json, name: str, folder: Path) -> Workload | None:
    """Return the workload in a document; None if the reader rejects it."""
    path = folder / "mutant.json"
    path.write_text(json.dumps(document))
    return read_strictly(path, name)


def read_strictly(path: Path, name: str) -> Workload | None:
    """Return the workload in a file; None if the reader rejects it."""
    form = load_format(name)
    assert form.read is not None
    try:
        value = form.read(path, ReadOptions(), Diagnostics())
    except InvariantError:
        raise
    except HespasError:
        return None
    return value if isinstance(value, Workload) else None


def broken_laws(
    workload: Workload, origin: str, folder: Path, targets: Sequence[str] = WRITTEN
) -> Iterator[str]:
    """Yield the broken laws of a workload that the reader of ``origin`` accepts. Internal errors are
    raised.
    """
    runner = TripRunner(folder)
    canonical = runner.canonical(workload)
    folds = not is_flat(workload.metadata, load_format(origin))
    for name in targets:
        trip = runner.run(canonical, name, folds=folds)
        if trip.is_unreadable:
            yield f"{name}: written and not read: {trip.refused}"
        if trip.back is None:
            continue
        if not load_format(name).losses:
            yield from (f"{name}: {difference}" for difference in workloads_equal(trip.ready, trip.back))
            continue
        columns = tuple(compare_columns(trip.ready, trip.back))
        pair = FormatPair(
            source=name, via=name, status=PairStatus.KEPT, columns=columns, findings=trip.findings
        )
        yield from (f"{name}: {column} changed, and nothing said so" for column in unreported(pair))


def used(workload: Workload, number: int) -> None:
    """Run the functions of the commands on a workload, with a device and an estimator that alternate with
    ``number``, so that all pairs occur. Raises for faults of Hespas.
    """
    turn, place = divmod(number, len(DEVICES))
    device, estimator = DEVICES[place], ESTIMATORS[turn % len(ESTIMATORS)]
    is_timed = (turn + turn // len(ESTIMATORS)) % 2  # so that each estimator is asked both ways

    def estimated() -> None:
        estimate(workload, device, estimator=estimator).to_json()

    def simulated() -> None:
        if is_timed:
            simulate(workload, device, estimator=estimator)
        else:
            simulate(workload)

    for action in (simulated, estimated, lambda: _summed(workload), lambda: _checked(workload)):
        try:
            action()
        except InvariantError:
            raise
        except HespasError:
            continue


def _summed(workload: Workload) -> None:
    view(workload).to_json()


def _checked(workload: Workload) -> None:
    check_workload(workload)
    check_workload(workload, "chakra")
    check_workload(workload, "astra-sim")
