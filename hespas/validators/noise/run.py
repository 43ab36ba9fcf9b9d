"""Runs of a program with noise: a child process (:mod:`.child`) runs it, and seeds give confidence
intervals.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log10, nan, sqrt
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from hespas.files.processes import clean_environment, decode_error, isolated_python, run
from hespas.graph.errors import UnsupportedError
from hespas.graph.progress import Progress
from hespas.validators.noise import NoiseJob, NoiseKind, NoisePoint, NoiseRun, PointResult
from hespas.validators.noise.child import JOB, PROGRESS, REFUSED, RESULT

__all__ = ["NoiseCurves", "NoiseRow", "NoiseSettings", "SiteRow", "run_with_noise"]

_Unit = Literal["lsb", "std"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRow:
    """Point of a curve: the kind of noise that varies, the noise of all kinds in units, the share of correct
    rows (NaN: no labels) and the signal-to-noise ratio of the output in dB (infinite: equal outputs). Both
    have confidence intervals over seeds.
    """

    kind: NoiseKind
    sigma_mac: float
    sigma_weight: float
    sigma_activation: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    snr_db: float
    snr_db_low: float
    snr_db_high: float

    @property
    def sigma(self) -> float:
        """Noise of the kind that varies."""
        return {"mac": self.sigma_mac, "weight": self.sigma_weight, "activation": self.sigma_activation}[
            self.kind
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """Noise of one kind at one contraction alone, at the largest sigma of its curve. ``unit`` is the value of
    one unit, from ``origin``.
    """

    site: str
    kind: NoiseKind
    sigma: float
    unit: float
    origin: str
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    snr_db: float
    snr_db_low: float
    snr_db_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseCurves:
    """Curves of a program with noise, and its contractions, most sensitive first.

    ``accuracy`` is that without noise (NaN: no labels).
    """

    rows: tuple[NoiseRow, ...]
    sites: tuple[SiteRow, ...]
    accuracy: float
    evaluated: int
    nested: int
    is_random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSettings:
    """Settings of runs with noise. ``sigmas`` are the values of each kind: several are a curve, one is added
    to the other curves. ``confidence`` is the level of the intervals.
    """

    sigmas: Mapping[NoiseKind, Sequence[float]]
    dims: Mapping[str, int]
    unit: _Unit
    bits: int
    seeds: int
    first_seed: int
    confidence: float
    timeout_s: float


def run_with_noise(
    program: bytes,
    path: str,
    data: Path | None,
    settings: NoiseSettings,
    progress: Progress | None = None,
) -> NoiseCurves:
    """Run a StableHLO program with noise. ``path`` names it in messages.

    Raises ``FormatError`` if a file cannot be read, ``UsageError`` if the data have other shapes than the
    program, and ``UnsupportedError`` if XLA refuses the program, crashes or does not finish.
    """
    curves = _curves(settings)
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    points = [point for curve in curves.values() for point in curve]
    alone = {kind: _point({kind: curve[-1].sigma(kind)}) for kind, curve in curves.items()}
    with tempfile.TemporaryDirectory(prefix="hespas-noise-") as scratch:
        folder = Path(scratch)
        file = folder / "program"
        file.write_bytes(program)
        job = NoiseJob(
            program=str(file),
            data="" if data is None else str(data.absolute()),
            path=path,
            dims=dict(settings.dims),
            unit=settings.unit,
            bits=settings.bits,
            points=[msgspec.structs.replace(point, seed=seed) for point in points for seed in seeds],
            single_sites=[
                msgspec.structs.replace(point, seed=seed) for point in alone.values() for seed in seeds
            ],
        )
        result = _answer(folder, job, settings.timeout_s, progress)
    by_point: dict[NoisePoint, list[PointResult]] = {}
    for entry in result.results:
        key = msgspec.structs.replace(entry.point, seed=0)
        by_point.setdefault(key, []).append(entry)
    rows = [
        NoiseRow(
            kind=kind,
            sigma_mac=point.mac,
            sigma_weight=point.weight,
            sigma_activation=point.activation,
            **_figures(by_point[point], settings.confidence),
        )
        for kind, curve in curves.items()
        for point in curve
    ]
    sites = [
        SiteRow(
            site=unit.name,
            kind=kind,
            sigma=point.sigma(kind),
            unit=unit.units[kind],
            origin=unit.origins[kind],
            **_figures(by_point[msgspec.structs.replace(point, site=number)], settings.confidence),
        )
        for kind, point in alone.items()
        for number, unit in enumerate(result.sites)
        if kind in unit.units
    ]
    has_labels = result.accuracy >= 0
    sites.sort(key=lambda row: (row.accuracy if has_labels else 0.0, row.snr_db))
    return NoiseCurves(
        rows=tuple(rows),
        sites=tuple(sites),
        accuracy=result.accuracy if has_labels else nan,
        evaluated=result.rows,
        nested=result.nested,
        is_random=result.is_random,
    )


def _curves(settings: NoiseSettings) -> dict[NoiseKind, list[NoisePoint]]:
    """Return the points of each curve. Kinds with one sigma are part of the other curves; if no kind has
    several, they are one curve from 0.
    """
    fixed = dict[NoiseKind, float]()
    swept = dict[NoiseKind, list[float]]()
    for kind, values in settings.sigmas.items():
        if len(values) == 1:
            fixed[kind] = values[0]
        elif values:
            swept[kind] = sorted(set(values))
    if not swept:
        return {next(iter(fixed)): [_point({}), _point(fixed)]}
    curves = dict[NoiseKind, list[NoisePoint]]()
    for kind, values in swept.items():
        curves[kind] = [_point({**fixed, kind: sigma}) for sigma in values]
    return curves


def _point(sigmas: Mapping[NoiseKind, float]) -> NoisePoint:
    return NoisePoint(sigmas.get("mac", 0.0), sigmas.get("weight", 0.0), sigmas.get("activation", 0.0))


def _answer(folder: Path, job: NoiseJob, timeout_s: float, progress: Progress | None) -> NoiseRun:
    """Run the child process, and return its result."""
    (folder / JOB).write_bytes(msgspec.json.encode(job))

    def reported() -> bool:
        if progress is not None and (folder / PROGRESS).exists():
            numbers = (folder / PROGRESS).read_text(encoding="ascii").split()
            if len(numbers) == 2:
                progress(int(numbers[0]), int(numbers[1]))
        return False

    ended = run(
        isolated_python("hespas.validators.noise.child", str(folder)),
        time_s=timeout_s,
        environment=clean_environment({"TF_CPP_MIN_LOG_LEVEL": "2"}),
        is_done=reported,
    )
    if (folder / RESULT).exists():
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=NoiseRun)
    if (folder / REFUSED).exists():
        texts = msgspec.json.decode((folder / REFUSED).read_bytes(), type=dict[str, str])
        error = decode_error(texts)
        error.path = texts["path"]
        raise error
    if ended.stopped == "time":
        raise UnsupportedError(
            f"the runs with noise do not finish within {timeout_s:g} s",
            path=job.path,
            hint="increase `timeout`, or use fewer `seeds`",
        )
    raise UnsupportedError(
        f"XLA {ended.describe()}", path=job.path, hint="run the program alone with jax.export to see why"
    )


def _figures(results: Sequence[PointResult], confidence: float) -> dict[str, float]:
    """Return accuracy and SNR by the names of the fields of rows: means over seeds, with the intervals of
    Student's t distribution.
    """
    from scipy.stats import t

    accuracy = [result.accuracy if result.accuracy >= 0 else nan for result in results]
    ratios = [
        10.0 * log10(result.signal / result.error) if result.error > 0 < result.signal else inf
        for result in results
    ]
    figures: dict[str, float] = {}
    for name, values in (("accuracy", accuracy), ("snr_db", ratios)):
        mean, half = float(np.mean(values)), nan
        if not isfinite(mean):
            half = 0.0
        elif len(values) > 1:
            deviation = float(np.std(values, ddof=1))
            half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * deviation / sqrt(len(values))
        low, high = mean - half, mean + half
        if name == "accuracy":  # a share
            low, high = (min(max(end, 0.0), 1.0) if isfinite(end) else nan for end in (low, high))
        figures |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return figures
