"""Child process that runs a StableHLO program with noise on XLA; see :mod:`.run`.

It is separate because a compiler may crash or use all memory on a program.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.stablehlo.dimensions import with_dims
from hespas.converters.stablehlo.mlir import MAX_QUOTE, Bindings, load_bindings, quoted
from hespas.converters.stablehlo.program import parse_program
from hespas.files.limits import limits
from hespas.files.processes import encode_error
from hespas.files.sandbox import bounded_memory
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from hespas.validators.noise import KINDS, NoiseJob, NoiseKind, NoiseRun, PointResult, SiteUnit
from hespas.validators.noise.quantised import without_quantised_types
from hespas.validators.noise.rewrite import (
    EntryFunction,
    NoiseSite,
    inlined_entry,
    insert_noise,
    return_sites,
)

__all__ = ["JOB", "PROGRESS", "REFUSED", "RESULT", "grid_step", "main"]

JOB, RESULT, REFUSED, PROGRESS = "job.json", "result.json", "refused.json", "progress"
"""Files in the folder of a run."""

_Values = NDArray[Any]

_MEMORY_BYTES, _MEMORY_PER_BYTE = 8 << 30, 2_000
_MOST_LEVELS = 1 << 10
_MOST_VALUES = 1 << 20
_REPEATS, _FEWEST_VALUES = 4, 16
"""Mean repetitions of a level, and number of values, from which equal values are a grid and not chance."""
_PAIRS = 20_000
_TEXT_LIMIT = 400


def main() -> int:
    """Run the job in the folder that the only argument names, and write its result there."""
    folder = Path(sys.argv[1])
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=NoiseJob)
    os.environ["JAX_PLATFORMS"] = "cpu"
    data = Path(job.program).read_bytes()
    try:
        try:
            with bounded_memory(_MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)):
                result = _NoisyProgram(data, job).run(folder / PROGRESS)
        except MemoryError:
            raise UnsupportedError(
                "the program needs more memory than the limit for a program of its size",
                hint="use a smaller batch",
            ) from None
    except HespasError as error:
        texts = encode_error(error) | {"path": error.path or job.path}
        (folder / REFUSED).write_bytes(msgspec.json.encode(texts))
        return 1
    (folder / RESULT).write_bytes(msgspec.json.encode(result))
    return 0


class _Inputs(NamedTuple):
    """Arguments of the program: whole arrays by number, and the numbers of those that are divided into
    batches. ``rows`` is the number of rows, and ``labels`` their classes (None: unknown).
    """

    arrays: dict[int, _Values]
    batched: tuple[int, ...]
    rows: int
    batch: int
    labels: _Values | None


class _NoisyProgram:
    """Program that can be compiled with noise of any kinds."""

    def __init__(self, data: bytes, job: NoiseJob) -> None:
        self.job = job
        self.bindings: Bindings = load_bindings()
        module = parse_program(data, self.bindings).module
        if job.dims:
            module = with_dims(module, job.dims, self.bindings)
        if b"quant" in data:
            module = without_quantised_types(module, self.bindings)
        entry = inlined_entry(module, self.bindings)
        self.nested = entry.nested
        self.program = self.bindings.bytecode(module)
        self.inputs = _inputs(entry, job)
        self.data_arguments = set(self.inputs.batched)
        if not job.data:
            self.data_arguments = set(range(len(entry.argument_types()))) - entry.parameter_arguments()
        self.jax: Any = import_module("jax")
        self.jax.config.update("jax_enable_x64", True)
        self.xla: Any = import_module("jaxlib.xla_client")
        (self.device, *_) = self.jax.devices("cpu")
        if not entry.sites(self.data_arguments):
            inside = (
                f"; {self.nested} are in branches, or in loops that are not unrolled, and get no noise"
                if self.nested
                else ""
            )
            raise UnsupportedError(
                f"the program has no contraction (dot_general, convolution) to add noise to{inside}",
                hint="unroll its loops (jax.lax.scan(..., unroll=True))" if self.nested else "check the file",
            )

    def parsed(self) -> tuple[EntryFunction, list[NoiseSite]]:
        """Return a new copy of the program, and its sites."""
        entry = inlined_entry(self.bindings.parse(self.program), self.bindings)
        return entry, entry.sites(self.data_arguments)

    def compiled(self, entry: EntryFunction) -> Any:
        """Compile a program. Raises ``UnsupportedError`` with the message of XLA."""
        listed = self.xla.DeviceList((self.device,))
        try:
            text = self.bindings.bytecode(entry.module)
            return self.device.client.compile_and_load(text, listed, self.xla.CompileOptions())
        except RuntimeError as error:
            raise UnsupportedError(
                f"XLA does not compile the program: {quoted(str(error).strip(), _TEXT_LIMIT)}",
                hint="run it alone with jax.export to see why",
            ) from None

    def outputs(self, executable: Any, start: int, extra: Sequence[_Values] = ()) -> list[_Values]:
        """Run a batch that begins at the row ``start``, and return the outputs."""
        inputs = self.inputs
        arguments: list[_Values] = []
        for number, array in sorted(inputs.arrays.items()):
            if number in inputs.batched and array.shape[0] != inputs.batch:
                rows = np.minimum(np.arange(start, start + inputs.batch), inputs.rows - 1)
                arguments.append(array[rows])
            else:
                arguments.append(array)
        buffers = [self.jax.device_put(array, self.device) for array in [*arguments, *extra]]
        try:
            results = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
            return [np.asarray(parts[0]) for parts in results]
        except RuntimeError as error:
            raise UnsupportedError(
                f"XLA does not run the program: {quoted(str(error).strip(), _TEXT_LIMIT)}",
                hint="use a program for one device, without collectives",
            ) from None

    def evaluated(self, executable: Any, amounts: _Values | None = None, seed: int = 0) -> _Values:
        """Return the first output for all rows."""
        parts: list[_Values] = []
        for number, start in enumerate(range(0, self.inputs.rows, self.inputs.batch)):
            device_seed, batch_seed = np.uint64(seed << 32), np.uint64((seed << 32) + number + 1)
            extra = () if amounts is None else (amounts, np.asarray(device_seed), np.asarray(batch_seed))
            output = self.outputs(executable, start, extra)[0]
            has_rows = self.inputs.batched and output.shape[:1] == (self.inputs.batch,)
            parts.append(output[: self.inputs.rows - start] if has_rows else output[None])
        return np.concatenate(parts)

    def run(self, progress: Path) -> NoiseRun:
        """Run all points of the job."""
        entry, sites = self.parsed()
        result_numbers = return_sites(entry, sites, self.bindings)
        values = self.outputs(self.compiled(entry), 0)
        units = [
            _unit(site, [values[number] if number >= 0 else None for number in numbers], self.job)
            for site, numbers in zip(sites, result_numbers, strict=True)
        ]
        clean = self.evaluated(self.compiled(self.parsed()[0])).astype(np.float64)
        points = list(self.job.points)
        points += [
            msgspec.structs.replace(point, site=site)
            for point in self.job.single_sites
            for site in range(len(sites))
        ]
        executables: dict[tuple[NoiseKind, ...], Any] = {}
        results: list[PointResult] = []
        for done, point in enumerate(points):
            kinds: tuple[NoiseKind, ...] = tuple(kind for kind in KINDS if point.sigma(kind) > 0)
            if kinds and kinds not in executables:
                noisy, noisy_sites = self.parsed()
                insert_noise(noisy, noisy_sites, kinds, self.bindings)
                executables[kinds] = self.compiled(noisy)
            output = clean
            if kinds:
                amounts = np.array(
                    [
                        point.sigma(kind) * unit.units.get(kind, 0.0) * (point.site in {-1, number})
                        for kind in kinds
                        for number, unit in enumerate(units)
                    ],
                    np.float32,
                )
                output = self.evaluated(executables[kinds], amounts, point.seed).astype(np.float64)
            error = float(np.square(output - clean).sum())
            results.append(PointResult(point, self.accuracy(output), float(np.square(clean).sum()), error))
            progress.write_text(f"{done + 1} {len(points)}", encoding="ascii")
        return NoiseRun(
            sites=units,
            nested=self.nested,
            rows=self.inputs.rows if self.job.data else 0,
            accuracy=self.accuracy(clean),
            is_random=not self.job.data,
            results=results,
        )

    def accuracy(self, output: _Values) -> float:
        """Return the share of rows whose largest output, or output, is their label; -1 without labels."""
        labels = self.inputs.labels
        if labels is None:
            return -1.0
        classes = output if output.ndim == 1 else output.reshape(len(output), -1).argmax(1)
        if len(classes) != len(labels):
            raise UsageError(
                f"the program returns {len(classes)} rows for {len(labels)} labels",
                path=self.job.data,
                hint="use a program whose first output has a row per input",
            )
        return float((classes == labels).sum() / len(labels))


def _unit(site: NoiseSite, values: Sequence[_Values | None], job: NoiseJob) -> SiteUnit:
    """Return the units of the noise at a site from the values of a batch."""
    left, right, result, rounded = values
    units = {"mac": _unit_of(result, rounded, job)}
    if site.weight >= 0:
        units["weight"] = _unit_of((left, right)[site.weight], None, job)
    if site.activations:
        # Of two activations, such as queries and keys, the left one sets the unit.
        units["activation"] = _unit_of((left, right)[site.activations[0]], None, job)
    return SiteUnit(
        name=site.name,
        units={kind: units[kind][0] for kind in KINDS if kind in units},
        origins={kind: units[kind][1] for kind in KINDS if kind in units},
    )


def _unit_of(values: _Values | None, rounded: _Values | None, job: NoiseJob) -> tuple[float, str]:
    """Return the unit of the noise on values, and its origin."""
    if values is None or not values.size:
        return 0.0, "no values"
    is_whole = np.issubdtype(values.dtype, np.integer)
    numbers = values.astype(np.float64).reshape(-1)
    if job.unit == "std":
        return float(numbers.std()), "standard deviation"
    if rounded is not None and rounded.size == numbers.size:
        step = _rounding_step(numbers, rounded.astype(np.float64).reshape(-1))
        if step > 0:
            return step, "rounding"
    if is_whole:
        return 1.0, "integer"
    if rounded is None and (step := grid_step(numbers)) > 0:
        return step, "grid"
    if values.ndim > 1 and rounded is None and values.shape[-1] <= _MOST_LEVELS:
        # Weights with a scale for each output channel: the unit keeps the power of the noise.
        channels = numbers.reshape(-1, values.shape[-1]).T
        steps = np.array([grid_step(channel) for channel in channels])
        if (steps > 0).all():
            return float(np.sqrt(np.square(steps).mean())), "grid of each channel"
    return float(np.ptp(numbers)) / (2**job.bits - 1), f"{job.bits} bits"


def grid_step(values: _Values) -> float:
    """Return the distance of equally spaced levels on which all values lie, -1 if there are none. _Values
    that are not repeated have no levels.
    """
    levels: _Values = np.unique(values[:: max(len(values) // _MOST_VALUES, 1)])
    is_repeated = len(values) >= max(_REPEATS * len(levels), _FEWEST_VALUES)
    if not 2 <= len(levels) <= 4 * _MOST_LEVELS or not is_repeated or not np.isfinite(levels).all():
        return -1.0
    steps = np.diff(levels)
    span = float(levels[-1] - levels[0])
    steps = steps[steps > 1e-5 * span]  # smaller ones are rounding errors of one level
    step = float(steps.min()) if len(steps) else span
    numbers: _Values = (levels - levels[0]) / step
    if span / step > _MOST_LEVELS or float(np.abs(numbers - np.round(numbers)).max()) > 0.02:
        return -1.0
    return span / float(round(span / step))


def _rounding_step(results: _Values, rounded: _Values) -> float:
    """Return the change of a result that changes the rounded value by one, -1 if they are not related."""
    rng = np.random.default_rng(0)
    inner = np.flatnonzero((rounded > rounded.min()) & (rounded < rounded.max()))
    if len(inner) < 2:
        return -1.0
    first, second = rng.choice(inner, (2, _PAIRS))
    change = np.abs(results[first] - results[second])
    is_different = change > 0
    slope = float(
        np.median(np.abs(rounded[first] - rounded[second])[is_different] / change[is_different])
        if is_different.any()
        else 0
    )
    return 1.0 / slope if slope > 0 and np.isfinite(slope) else -1.0


def _parameters(entry: EntryFunction) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and type of each argument. Raises ``UnsupportedError`` for symbolic dimensions."""
    names = {"i1": "bool", "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
    names |= {f"{sign}i{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)}
    extensions = import_module("ml_dtypes")
    listed: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
    for number, text in enumerate(entry.argument_types()):
        *extents, element = text.removeprefix("tensor<").removesuffix(">").split("x")
        if not text.startswith("tensor<") or not all(part.isdecimal() for part in extents):
            raise UnsupportedError(
                f"argument {number} has the type {quoted(text, MAX_QUOTE)}",
                hint="state its dimensions with `dims`",
            )
        name = names.get(element, f"float8_{element[2:].lower()}")
        try:
            dtype: np.dtype[Any] = np.dtype(getattr(extensions, name, name))
        except (AttributeError, TypeError):
            raise UnsupportedError(
                f"argument {number} has elements of type {quoted(element)}, which NumPy does not have",
                hint="convert the argument inside the program",
            ) from None
        listed.append((tuple(map(int, extents)), dtype))
    return listed


def _inputs(entry: EntryFunction, job: NoiseJob) -> _Inputs:
    """Return the arguments of the program from the data of the job, or random ones."""
    parameters = _parameters(entry)
    if not job.data:
        rng = np.random.default_rng(7)
        drawn = {
            number: np.asarray(
                rng.integers(0, 2, shape) if dtype.kind in "iub" else rng.standard_normal(shape)
            ).astype(dtype)
            for number, (shape, dtype) in enumerate(parameters)
        }
        return _Inputs(drawn, (), 1, 1, None)
    given = _loaded(Path(job.data))
    labels = given.pop("labels", None)
    if labels is not None and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        raise _wrong(
            job, f"labels has shape {labels.shape} and type {labels.dtype}", "save one class per row"
        )
    named = {
        int(name[3:]): array for name, array in given.items() if name[:3] == "arg" and name[3:].isdecimal()
    }
    others = {name: array for name, array in given.items() if name != "inputs" and f"arg{name[3:]}" != name}
    if others:
        raise _wrong(job, f"unknown array {quoted(next(iter(others)))}", "name arrays inputs, labels or argN")
    free: list[int] = []
    if "inputs" in given:
        free = [number for number in range(len(parameters)) if number not in named]
        if len(free) != 1:
            counts = f"the program has {len(parameters)} arguments, and the data {len(named)} as argN"
            raise _wrong(job, f"inputs does not identify an argument: {counts}", "name the other arrays argN")
        named[free[0]] = given["inputs"]
    missing = [number for number in range(len(parameters)) if number not in named]
    if missing or len(named) != len(parameters):
        lacks = (
            f"no array for argument {missing[0]}" if missing else f"no argument {max(named)} in the program"
        )
        raise _wrong(job, lacks, f"save {', '.join(f'arg{number}' for number in range(len(parameters)))}")
    rows = len(labels) if labels is not None else -1
    batched: list[int] = []
    arrays: dict[int, _Values] = {}
    for number, (shape, dtype) in enumerate(parameters):
        array = named[number]
        is_batched = bool(shape) and array.ndim == len(shape) and array.shape[1:] == shape[1:]
        is_input = free == [number] or (not free and array.shape[:1] == (rows,))
        if array.shape != shape and not is_batched:
            expected = "x".join(map(str, shape))
            raise _wrong(
                job, f"the array of argument {number} has shape {array.shape}",
                f"save an array of shape {expected}, or with another number of rows",
            )  # fmt: skip
        arrays[number] = array.astype(dtype)
        if is_batched and (is_input or array.shape != shape):
            batched.append(number)
    counts_of_rows = {len(arrays[number]) for number in batched} | {rows} - {-1}
    batches = {parameters[number][0][0] for number in batched}
    if not batched or len(counts_of_rows) != 1 or len(batches) != 1 or 0 in counts_of_rows | batches:
        counts = ", ".join(f"{len(arrays[number])} in argument {number}" for number in batched) or "none"
        counts += f", {rows} labels" if rows >= 0 else ""
        raise _wrong(job, f"the numbers of rows differ: {counts}", "save one label and one input per row")
    return _Inputs(arrays, tuple(batched), counts_of_rows.pop(), batches.pop(), labels)


def _wrong(job: NoiseJob, message: str, hint: str) -> UsageError:
    return UsageError(message, path=job.data, hint=hint)


def _loaded(path: Path) -> dict[str, _Values]:
    """Return the arrays of an .npz file, without pickled objects. Raises ``FormatError``."""
    hint = "write it with numpy.savez(FILE, inputs=..., labels=...)"
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(part.file_size for part in archive.infolist())
        if size > limits().input_bytes:
            raise FormatError(f"its arrays have {size:,} bytes", path=str(path), hint="use fewer rows")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise FormatError(
            f"not an .npz file of arrays: {quoted(str(error))}", path=str(path), hint=hint
        ) from None
