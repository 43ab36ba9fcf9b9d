"""Comparison of generators of synthetic graphs on measured ones: ``python -m tools.synthesis FILE``.

FILE has graphs with costs in the format of ``torch.save``: a dictionary of the lists ``src_list``,
``dst_list``, ``x_n_list`` (node types) and ``y_list`` (costs), such as
shared/data/dag_generation/tpu_tile_val.pth. It is read without torch and without unpickling: only the pickle
operations that build lists of integer tensors are interpreted.

Graphs are split into halves for training and testing, once per seed: *graphs* splits at random, so that test
graphs can repeat training graphs; *structures* keeps all graphs of equal structure in one half. With ``--test
FILE`` all graphs of the first file are used for training. Each generator makes 600 graphs.
"""

from __future__ import annotations

import argparse
import math
import pickletools
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from hespas.generators.synth import (
    SynthesisCard,
    Synthesizer,
    Transformer,
    TypedDag,
    flatten,
    measure_synthesis,
    structure_key,
)
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError

__all__ = ["main", "read_graphs"]

_MOST_BYTES = 1 << 28
_MARK = object()
_REBUILD = "torch._utils _rebuild_tensor_v2"
_STORAGES = {"torch LongStorage": "<i8", "torch IntStorage": "<i4"}
_CONSTANTS = frozenset({"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "GLOBAL"})
"""Operations whose argument is the value. Names of functions are strings here, and nothing is imported."""
_NEW: dict[str, Callable[[], object]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NEWFALSE": bool,
    "MARK": lambda: _MARK,
}


def read_graphs(path: Path) -> list[TypedDag]:
    """Read the graphs of a file. Nothing in the file is executed."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
            raise FormatError(f"more than {_MOST_BYTES:,} bytes", path=str(path), hint="use a smaller file")
        programs = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise FormatError("expected one entry data.pkl", path=str(path), hint="write it with torch.save")
        folder = programs[0].removesuffix("data.pkl")
        content: Any = _interpret(archive.read(programs[0]), lambda key: archive.read(f"{folder}data/{key}"))
    columns = (content[name] for name in ("src_list", "dst_list", "x_n_list", "y_list"))
    return [
        TypedDag.from_edges(types.tolist(), zip(sources.tolist(), targets.tolist(), strict=True), float(cost))
        for sources, targets, types, cost in zip(*columns, strict=True)
    ]


def _interpret(program: bytes, storage: Callable[[str], bytes]) -> object:
    """Return the value of a pickle of lists, dictionaries, numbers and integer tensors, without executing
    it.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def group() -> list[Any]:
        start = max(index for index, value in enumerate(stack) if value is _MARK)
        values = stack[start + 1 :]
        del stack[start:]
        return values

    for operation, argument, _ in pickletools.genops(program):
        value: Any = argument
        match operation.name:
            case "PROTO" | "FRAME":
                pass
            case name if name in _CONSTANTS:
                stack.append(value)
            case name if name in _NEW:
                stack.append(_NEW[name]())
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "TUPLE":
                stack.append(tuple(group()))
            case "TUPLE1":
                stack.append((stack.pop(),))
            case "APPENDS":
                values = group()
                stack[-1].extend(values)
            case "SETITEMS":
                values = group()
                stack[-1].update(zip(values[::2], values[1::2], strict=True))
            case "BINPERSID":
                _, kind, key, _, count = stack.pop()
                stack.append(np.frombuffer(storage(key), dtype=_STORAGES[kind], count=count))
            case "REDUCE":
                values = stack.pop()
                function = stack.pop()
                stack.append(_tensor(*values[:4]) if function == _REBUILD else _empty(function))
            case "STOP":
                return stack.pop()
            case name:
                raise FormatError(f"unsupported pickle operation {name}", hint="save lists of tensors")
    raise FormatError("the pickle has no end", hint="copy the file again")


def _tensor(values: IntArray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> IntArray:
    if strides != (1,) or not 0 <= offset <= offset + shape[0] <= len(values):
        raise FormatError(f"tensor of shape {shape} and strides {strides}", hint="save contiguous rows")
    return values[offset : offset + shape[0]].astype(np.int64)


def _empty(function: str) -> dict[str, object]:
    if function != "collections OrderedDict":
        raise FormatError(f"the pickle calls {function!r}", hint="save lists of tensors")
    return {}


@dataclass(frozen=True, slots=True)
class _Row:
    """Result of one generator on one split. The seconds are CPU time."""

    generator: str
    split: str
    card: SynthesisCard
    fit_s: float = math.nan
    sample_s: float = math.nan


def _parts(
    graphs: Sequence[TypedDag], split: str, seed: int, test: Sequence[TypedDag]
) -> tuple[list[TypedDag], list[TypedDag]]:
    """Return the graphs for training and the graphs for testing."""
    if test:
        return list(graphs), list(test)
    keys = list(range(len(graphs)))
    if split == "structures":
        keys = [structure_key(dag) for dag in graphs]
    distinct = sorted(set(keys))
    order = np.random.default_rng(seed).permutation(len(distinct)).tolist()
    chosen = {distinct[index] for index in map(int, order[: len(distinct) // 2])}
    return (
        [dag for dag, key in zip(graphs, keys, strict=True) if key in chosen],
        [dag for dag, key in zip(graphs, keys, strict=True) if key not in chosen],
    )


def _rows(
    training: Sequence[TypedDag],
    test: Sequence[TypedDag],
    split: str,
    seed: int,
    options: argparse.Namespace,
) -> Iterator[_Row]:
    yield _Row("real training graphs", split, measure_synthesis(training, training, test))
    yield _Row("real test graphs", split, measure_synthesis(test, training, test))
    for model, novelty in product(options.models, options.novelty):
        start = process_time()
        fitted_model = Transformer([flatten(dag) for dag in training]) if model == "transformer" else None
        synthesizer = Synthesizer(training, novelty=novelty, model=fitted_model)
        fitted = process_time()
        generated = synthesizer.sample(options.count, seed=seed)
        end = process_time()
        card = measure_synthesis(generated, training, test)
        yield _Row(f"{model}, novelty {novelty:g}", split, card, fitted - start, end - fitted)


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    """Write a Markdown table: the mean over the seeds, and the range."""
    names = [field.name for field in fields(SynthesisCard)]
    for split in dict.fromkeys(row.split for row in rows):
        chosen = [row for row in rows if row.split == split]
        generators = list(dict.fromkeys(row.generator for row in chosen))
        yield f"\nSplit by {split}\n\n| figure | {' | '.join(generators)} |\n|---|{'---|' * len(generators)}"
        for name in [*names, "fit_s", "sample_s"]:
            cells: list[str] = []
            for generator in generators:
                same = [row for row in chosen if row.generator == generator]
                values = np.array([getattr(row.card if name in names else row, name) for row in same])
                mean, low, high = values.mean(), values.min(), values.max()
                cells.append("-" if np.isnan(mean) else f"{mean:.3f} ({low:.3f}-{high:.3f})")
            yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table of the generators."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="file of graphs")
    parser.add_argument("--test", type=Path, help="file of test graphs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds. [default: 3]")
    parser.add_argument("--count", type=int, default=600, help="graphs per generator. [default: 600]")
    parser.add_argument(
        "--novelty", type=float, nargs="+", default=[1.0], help="novelties to compare. [default: 1]"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=["n-gram", "transformer"],
        default=["n-gram", "transformer"],
        help="models to compare. [default: both]",
    )
    options = parser.parse_args()
    graphs = read_graphs(options.file)
    test = read_graphs(options.test) if options.test else []
    rows: list[_Row] = []
    for split in ("file",) if test else ("graphs", "structures"):
        for seed in range(options.seeds):
            rows += _rows(*_parts(graphs, split, seed, test), split, seed, options)
            sys.stderr.write(f"split by {split}, seed {seed}: done\n")
    sys.stdout.write("\n".join(_table(rows)) + "\n")


if __name__ == "__main__":
    main()
