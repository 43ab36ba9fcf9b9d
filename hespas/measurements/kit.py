"""Measurement kit: a list of operations that identifies a new device, and its measurement in PyTorch or JAX.

The list depends only on the device file. It has products from single rows to large ones, aligned and odd, in
the fastest float format of the device and in fp8 if the device has it; attention of prompts and of single
tokens; a sweep of additions from the launch time to the memory bandwidth; copies, sums and softmax. Sizes of
products and attention are quasi-random points (Sobol) in log2 of the sizes of language models.
``python -m benchmarks.carry_over.few_rows --kit`` compares a fit to these rows with fits to random rows.

The table of results is a tidy table (:mod:`hespas.measurements.tidy`), which ``calibrate`` and ``accuracy``
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hespas.files.output import check_destination, write_atomically
from hespas.graph import Diagnostics, find_dtype
from hespas.graph.errors import UnsupportedError, UsageError, clipped
from hespas.graph.progress import Progress
from hespas.hardware import Device, canonical_name, peak_for
from hespas.hardware.measure import TimedLoops, TimedSample, median_time, warn_unsteady
from hespas.measurements.columns import Columns
from hespas.measurements.tidy import tidy_operations
from hespas.operations import Operations, find_scheme

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "KitFramework",
    "KitMeasurement",
    "KitShape",
    "kit_operations",
    "kit_shapes",
    "measure_kit",
    "write_kit",
]

_FORMATS = ("bf16", "f16", "f32_full")
"""Float formats to choose from: the one with the highest rate on the device; of equal ones the first."""
_FP8 = "fp8"

_PRODUCTS = (
    *((1, 128, 128), (8192, 8192, 8192), (546, 1216, 640), (22, 64, 3456), (1, 6400, 64), (4491, 320, 5824)),
    *((2611, 15360, 1472), (6, 576, 320), (41, 2112, 13376), (98, 256, 192), (192, 4288, 11584)),
    *((85, 448, 192), (4, 1984, 1216), (1171, 64, 384), (6591, 3136, 128), (2, 192, 4992), (16, 9792, 768)),
    *((324, 768, 2816), (413, 8320, 192), (10, 832, 9216), (3, 3840, 512), (5921, 128, 1088)),
    *((1128, 1600, 4416), (5, 64, 128), (54, 4992, 2240), (228, 384, 896), (145, 2560, 3840)),
    *((37, 192, 512), (8, 13184, 7296), (1543, 704, 64), (2849, 7552, 320), (1, 256, 1856)),
    *((21, 1024, 128), (751, 128, 15104), (651, 6016, 1472), (19, 320, 384), (1000, 1000, 1000)),
    *((33, 4097, 1025),),
)
"""Products: m, n, k. The last two are not multiples of 64 in any size."""
_FP8_PRODUCTS = 20
"""Number of products that are also measured in fp8: the first ones."""
_PROMPTS = (
    *((8, 32, 16, 1, 128), (32, 208, 96, 8, 64), (2, 864, 1, 1, 256), (4, 160, 4, 2, 256)),
    *((16, 48, 4, 4, 128), (4, 4336, 40, 2, 128), (4, 304, 2, 1, 128), (16, 560, 40, 4, 128)),
    *((128, 16, 8, 1, 256), (2, 7968, 32, 32, 64), (1, 64, 64, 32, 64), (32, 112, 24, 12, 128)),
    *((8, 1584, 12, 2, 128), (8, 80, 64, 32, 256), (32, 1808, 2, 1, 64), (64, 64, 32, 8, 128)),
    *((1, 2016, 8, 2, 128), (2, 16, 1, 1, 128), (16, 336, 12, 1, 64), (4, 416, 24, 12, 256)),
    *((8, 48, 16, 8, 64), (16, 3264, 16, 4, 256), (64, 128, 1, 1, 128), (2, 1120, 96, 1, 128)),
    *((2, 240, 32, 2, 128), (64, 656, 8, 8, 128), (32, 32, 40, 2, 256), (8, 5520, 4, 2, 64)),
    *((8, 176, 12, 12, 128), (16, 768, 24, 1, 128), (64, 32, 2, 2, 64), (2, 4736, 64, 4, 256)),
)
"""Attention of prompts: batch, query length, heads, key and value heads, head dimension."""
_TOKENS = (
    *((32, 11, 16, 1, 128), (256, 144, 96, 8, 64), (2, 1056, 1, 1, 256), (4, 96, 4, 2, 256)),
    *((512, 1360, 32, 4, 64), (32, 16, 4, 4, 128), (8, 10096, 40, 2, 128), (8, 240, 2, 1, 128)),
    *((64, 576, 40, 4, 128), (1024, 7, 8, 1, 256), (4, 23600, 32, 32, 64), (1, 32, 64, 32, 64)),
    *((256, 5568, 2, 1, 256), (128, 64, 24, 12, 128), (16, 2448, 12, 2, 128), (16, 48, 64, 32, 256)),
    *((128, 2960, 2, 1, 64), (256, 32, 32, 8, 128), (1, 3472, 8, 2, 128), (4, 4, 1, 1, 128)),
    *((64, 288, 12, 1, 64), (8, 368, 24, 12, 256), (16, 16, 16, 8, 64), (32, 6752, 16, 4, 256)),
    *((512, 64, 1, 1, 128), (4, 1536, 96, 1, 128), (2, 176, 32, 2, 128), (256, 736, 8, 8, 128)),
    *((64, 7, 40, 2, 256), (32, 14128, 4, 2, 64), (32, 128, 12, 12, 128), (64, 896, 24, 1, 128)),
    *((256, 10, 2, 2, 64), (2, 11408, 64, 4, 256), (4, 12, 24, 2, 256), (32, 96, 64, 2, 128)),
)
"""Attention of one new token: batch, cached length, heads, key and value heads, head dimension."""
_ADDITIONS = (
    *((1, 64), (16, 1024), (64, 1000), (100, 2048), (128, 4096), (512, 2048), (333, 5120), (1024, 4096)),
    *((2048, 4096), (4096, 3584), (8192, 4096), (4095, 14336), (12288, 8192), (16384, 8192), (32768, 8192)),
)
"""Additions of two tensors: rows, columns. The first is as long as a launch, the last as the memory."""
_STREAMS = (("move", "copy"), ("reduction", "sum"), ("normalization", "softmax"))
_STREAM_SIZES = ((64, 1000), (8192, 4096))

_LONGEST_NS = 20e6
"""Longest time of a shape by the data sheet; sizes of longer ones are halved."""
_SHARE_OF_MEMORY = 0.25
_DIVIDED = ("batch", "m", "n", "k", "q_len", "kv_len", "rows", "columns")
"""Sizes that are halved, the largest first, where a shape is too long for a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KitShape:
    """Operation of the kit. ``sizes`` are the columns of a tidy table for the ``kind``; ``dtype`` is a number
    format that :func:`~hespas.operations.model.find_scheme` accepts.
    """

    kind: str
    dtype: str
    op: str = ""
    sizes: tuple[tuple[str, int], ...]

    def size(self, name: str) -> int:
        """Return one of the sizes."""
        return dict(self.sizes)[name]


class KitFramework(Protocol):
    """Framework that runs operations. ``kind`` is the kind of its device (``cpu``, ``gpu``, ``tpu``), and
    ``device`` the device's name as the framework reports it. ``variant`` is the variant of its rows
    (:func:`~hespas.operations.model.timed_with_events`).
    """

    name: str
    version: str
    kind: str
    device: str
    variant: str

    def loops(self, shape: KitShape) -> TimedLoops:
        """Return a function that runs an operation a number of times back to back, and returns the time of
        all runs [ns].

        Raises ``UnsupportedError`` if the framework does not have the operation. Both the call and the
        function may raise the framework's own errors, such as for a lack of memory.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KitMeasurement:
    """Measured shapes of a device. ``frame`` is a tidy table with one row per shape; ``skipped`` counts the
    shapes that could not be measured.
    """

    device: Device
    frame: pd.DataFrame
    skipped: int
    diagnostics: Diagnostics = field(default_factory=Diagnostics)


def kit_shapes(device: Device) -> tuple[KitShape, ...]:
    """Return the operations of the kit for a device, without equal ones.

    Shapes that take more than 20 ms at the rates of the device file, or more than a quarter of its memory,
    have smaller sizes. Raises ``UsageError`` if the device has no rate of a float format.
    """
    rates: dict[str, float] = {}
    for name in (*_FORMATS, _FP8):
        scheme = find_scheme(name)
        assert scheme is not None
        try:
            choice = peak_for(device, "matrix", scheme.rate_dtype, products=scheme.products)
        except UnsupportedError:
            continue
        formats = [find_dtype(dtype) for dtype in (choice.peak.dtype, scheme.rate_dtype)]
        if len({entry.bits for entry in formats if entry is not None}) == 1:  # not the rate of a wider type
            rates[name] = choice.flops_per_s
    floats = [name for name in _FORMATS if name in rates]
    if not floats:
        raise UsageError(
            f"the file of {device.name} has no rate of {', '.join(_FORMATS)}",
            hint="add a dense peak of f32, f16 or bf16 to the hardware file",
        )
    usual = max(floats, key=rates.__getitem__)

    def shape(
        kind: str, sizes: tuple[int, ...], names: Sequence[str], op: str = "", dtype: str = usual
    ) -> KitShape:
        return KitShape(kind=kind, op=op, dtype=dtype, sizes=tuple(zip(names, sizes, strict=True)))

    stream = ("rows", "columns")
    heads = ("heads", "kv_heads", "head_dim")
    listed = [
        *(shape("matmul", (1, *sizes), ("batch", "m", "n", "k")) for sizes in _PRODUCTS),
        *(shape("attention.context", sizes, ("batch", "q_len", *heads)) for sizes in _PROMPTS),
        *(shape("attention.generation", sizes, ("batch", "kv_len", *heads)) for sizes in _TOKENS),
        *(shape("vector", sizes, stream, "add") for sizes in _ADDITIONS),
        *(shape(kind, sizes, stream, op) for kind, op in _STREAMS for sizes in _STREAM_SIZES),
    ]
    if _FP8 in rates:
        products = _PRODUCTS[:_FP8_PRODUCTS]
        listed += [shape("matmul", (1, *sizes), ("batch", "m", "n", "k"), dtype=_FP8) for sizes in products]
    memory = device.main_memory
    most_bytes = _SHARE_OF_MEMORY * (memory.capacity_bytes if memory.capacity_bytes > 0 else np.inf)
    rate = np.array([rates[row.dtype] for row in listed])
    while True:
        before = tuple(listed)
        ops = kit_operations(before, device)
        time_ns = 1e9 * np.fmax(ops.flops / rate, ops.bytes_moved / memory.bandwidth_bytes_per_s)
        large = (time_ns > _LONGEST_NS) | (ops.bytes_moved > most_bytes)
        for row in np.flatnonzero(large).tolist():
            sizes = before[row].sizes
            largest = max((size, name) for name, size in sizes if name in _DIVIDED)[1]
            halved = tuple((name, -(-size // 2) if name == largest else size) for name, size in sizes)
            listed[row] = replace(before[row], sizes=halved)
        if tuple(listed) == before:  # all are short enough, or as small as can be
            return tuple(dict.fromkeys(listed))


def kit_operations(shapes: Sequence[KitShape], device: Device) -> Operations:
    """Return shapes as operations, as the reader of tables does."""
    return tidy_operations(Columns(Path("kit"), _frame_of(shapes, device)))


def _frame_of(shapes: Sequence[KitShape], device: Device) -> pd.DataFrame:
    import pandas as pd

    labels = {
        "hardware": [device.name] * len(shapes),
        "kind": [shape.kind for shape in shapes],
        "op": [shape.op for shape in shapes],
        "dtype": [shape.dtype for shape in shapes],
    }
    sizes = pd.DataFrame([dict(shape.sizes) for shape in shapes]).astype("Int64")
    return pd.concat([pd.DataFrame(labels), sizes], axis=1)


def measure_kit(
    device: Device,
    framework: KitFramework,
    *,
    shapes: Sequence[KitShape] | None = None,
    repeats: int = 9,
    sample_ns: int = 10_000_000,
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> KitMeasurement:
    """Measure ``shapes`` (None: :func:`kit_shapes`) on the device of ``framework``; no file is written.

    Each time is the median of ``repeats`` loops that run for at least ``sample_ns``, after a warm-up; the
    caches are warm. Shapes that the framework does not support, or that do not fit into memory, are skipped
    (``kit.skipped``). Repeats that differ are reported (``hardware.unsteady``). Raises ``UsageError`` if the
    framework runs on another kind of device, ``UnsupportedError`` if no shape can be measured.
    """
    sink = diagnostics if diagnostics is not None else Diagnostics()
    if any((device.kind == kind) != (framework.kind == kind) for kind in ("cpu", "tpu")):
        raise UsageError(
            f"{framework.name} runs on a {framework.kind} ({clipped(framework.device)}), "
            f"but {device.name} is a {device.kind}",
            hint=f"install {framework.name} for {device.name}, or name the device of this machine",
        )
    found = canonical_name(framework.device)
    if found and found != device.name:
        text = f"{framework.name} runs on {found}: its times are written as times of {device.name}"
        sink.warning("kit.other-device", device.name, text)
    shapes = kit_shapes(device) if shapes is None else shapes
    measured: list[KitShape] = []
    samples: list[TimedSample] = []
    for number, shape in enumerate(shapes):
        if progress is not None:
            progress(number, len(shapes))
        label = " ".join((shape.kind, shape.op, shape.dtype)).replace("  ", " ")
        try:
            timed = framework.loops(shape)
            timed(1)  # warm-up
            sample = median_time(timed, sample_ns=sample_ns, repeats=repeats)
        except (UnsupportedError, RuntimeError, ValueError, MemoryError) as error:
            reason = clipped((str(error).splitlines() or [type(error).__name__])[0])
            sink.warning("kit.skipped", device.name, f"{label}: shape skipped: {reason}")
            continue
        measured.append(shape)
        samples.append(sample)
    if not measured:
        raise UnsupportedError(
            f"{framework.name} could not run any of {len(shapes)} shapes on {clipped(framework.device)}",
            hint="the warnings state why; try the other framework",
        )
    warn_unsteady([sample.spread for sample in samples], sink, device.name)
    frame = _frame_of(measured, device).assign(
        variant=framework.variant,
        framework=framework.name,
        framework_version=framework.version,
        device=framework.device,
        duration_ns=[sample.median_ns for sample in samples],
        duration_ns_std=[sample.std_ns for sample in samples],
        repeats=repeats,
    )
    return KitMeasurement(device=device, frame=frame, skipped=len(shapes) - len(measured), diagnostics=sink)


def write_kit(measurement: KitMeasurement, path: Path, *, overwrite: bool = False) -> Path:
    """Write the table as Parquet, or as CSV for a name that ends in ``.csv``. Raises ``OutputError``."""

    def fill(temporary: Path) -> None:
        if path.suffix == ".csv":
            measurement.frame.to_csv(temporary, index=False)
        else:
            measurement.frame.to_parquet(temporary, index=False)

    check_destination(path, overwrite=overwrite)
    write_atomically(path, fill, overwrite=overwrite, directory=False)
    return path
