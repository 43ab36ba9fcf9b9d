"""Fits of the interference factors of :mod:`hespas.hardware.kernel_shares` to recorded traces.

``python -m benchmarks.interference [FOLDER]`` reads the traces of :data:`TRACES` that the folder holds
(archives are unpacked). Kernels are grouped by name, grid and operand shapes. An execution is alone if less
than 2 % of its time overlaps collectives, and overlapped if more than half does. The slowdown of a group is
the time of its overlapped executions beyond the median alone, relative to that median and the overlapped
share of their time. The factor is the slowdown summed over groups, divided by the slowdown that the form of
:mod:`hespas.simulator.interference` predicts with a factor of 1. Errors are standard deviations of 400
bootstrap draws of groups. Held out: the relative error of the predicted time of overlapped kernels with the
pooled factor of the other traces, and with no interference. Collectives: the slope of their time over the
share that overlaps kernels; waits for other ranks hide part of it.
"""

from __future__ import annotations

import argparse
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from hespas.api.io import read_profiles
from hespas.graph import Profile
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.timeline import Intervals, united
from hespas.hardware import Device, load_device
from hespas.hardware.kernel_shares import Bound, held_units

__all__ = ["TRACES", "Fitted", "fitted", "form_of", "main", "pooled"]

_FOLDER = Path(__file__).parents[2] / "shared" / "data" / "profiles"
TRACES = {
    "A100-SXM-40GB": "a100-40_recsys_train_rank3of8.json.gz",
    "V100-SXM2-32GB": "v100_dlrm_train_8rank_kineto.tar.gz",
    "MI350X": "mi350x_rocprofv3_908_results.json.gz",
}
_ARITHMETIC = ("gemm", "cutlass", "cijk", "attn", "bwd_kernel_fuse", "flash", "conv_")
"""Parts of the names of compute-bound kernels. All other kernels count as memory-bound."""
_BOUNDS: tuple[Bound, ...] = ("compute", "memory")
_ALONE, _BESIDE, _SHORTEST_NS, _DRAWS = 0.02, 0.5, 2_000.0, 400


class _Kernels(NamedTuple):
    """Device work of one rank: group key, whether it is a collective, duration [ns], and the share (0..1) of
    the duration that overlaps the other kind (collectives for kernels, kernels for collectives).
    """

    key: list[str]
    talks: BoolArray
    duration_ns: FloatArray
    beside: FloatArray


class Fitted(NamedTuple):
    """A factor of one trace, from ``n`` overlapped executions in ``keys`` groups. ``alone_ns`` is their time
    alone weighted with the overlapped share, ``added_ns`` the time that interference adds.
    """

    value: float
    std_error: float
    n: int
    keys: int
    added_ns: float
    alone_ns: float


def _profiles(path: Path) -> Iterator[Profile]:
    if not path.name.endswith(".tar.gz"):
        yield from read_profiles(path)
        return
    with TemporaryDirectory() as folder:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        for file in sorted(Path(folder).rglob("*.json")):
            yield from read_profiles(file)


def _kernels(profile: Profile) -> _Kernels:
    texts, start_ns = profile.strings, profile.start_ns
    chosen = np.flatnonzero(profile.grid_id > 0)
    names = [texts[row] for row in profile.kernel_id[chosen].tolist()]
    talks = np.array(["nccl" in name.lower() for name in names], np.bool_)
    start_ns, duration_ns = start_ns[chosen], profile.duration_ns[chosen]
    beside = np.zeros(len(chosen))
    for mine in (talks, ~talks):
        others = Intervals(*united(start_ns[~mine], start_ns[~mine] + duration_ns[~mine]))
        until, since = (others.elapsed_ns(at[mine]) for at in (start_ns + duration_ns, start_ns))
        beside[mine] = (until - since) / np.maximum(duration_ns[mine], 1.0)
    places = zip(profile.grid_id[chosen].tolist(), profile.shapes_id[chosen].tolist(), strict=True)
    keys = [f"{name} {texts[grid]} {texts[shape]}" for name, (grid, shape) in zip(names, places, strict=True)]
    return _Kernels(keys, talks, duration_ns, beside)


def _by_key(ranks: Sequence[_Kernels], *, talks: bool) -> dict[str, FloatArray]:
    """Return by key the durations [ns] and overlapped shares, each of shape ``(executions, 2)``."""
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for rank in ranks:
        columns = zip(
            rank.key, rank.talks.tolist(), rank.duration_ns.tolist(), rank.beside.tolist(), strict=True
        )
        for key, mine, duration_ns, beside in columns:
            if mine == talks:
                rows[key].append((duration_ns, beside))
    return {key: np.array(found) for key, found in rows.items()}


def form_of(device: Device, bound: Bound) -> float:
    """Return the relative slowdown of a kernel with a factor of 1, while collectives use the full link
    bandwidth.
    """
    if bound == "compute":
        held = held_units(device)
        assert held is not None
        share = held.units / device.units
    else:
        link = device.link("scale_up")
        assert link is not None
        share = 2.0 * link.bandwidth_bytes_per_s / device.main_memory.bandwidth_bytes_per_s
    share = min(share, 0.5)
    return share / (1.0 - share)


def _fit(ranks: Sequence[_Kernels], bound: Bound, form: float) -> Fitted:
    """Return the factor of one trace for compute-bound or memory-bound kernels."""
    found: list[tuple[float, float, float]] = []
    for key, rows in _by_key(ranks, talks=False).items():
        if any(word in key.lower() for word in _ARITHMETIC) != (bound == "compute"):
            continue
        alone, beside = rows[rows[:, 1] < _ALONE, 0], rows[rows[:, 1] > _BESIDE]
        if len(alone) < 2 or not len(beside) or np.median(alone) < _SHORTEST_NS:
            continue
        usual = float(np.median(alone))
        found.append((float((beside[:, 0] - usual).sum()), usual * float(beside[:, 1].sum()), len(beside)))
    table = np.array(found)
    draws = np.random.default_rng(0).integers(0, len(table), (_DRAWS, len(table)))
    drawn = table[draws].sum(axis=1)
    added, alone_ns, count = table.sum(axis=0).tolist()
    error = float(np.std(drawn[:, 0] / drawn[:, 1])) / form
    return Fitted(added / alone_ns / form, error, int(count), len(table), added, alone_ns)


def fitted(folder: Path) -> dict[str, dict[Bound, Fitted]]:
    """Return the factors of both bounds by device, for the traces of a folder. Prints the slope of
    collectives.
    """
    result: dict[str, dict[Bound, Fitted]] = {}
    for name, file in TRACES.items():
        if not (folder / file).exists():
            continue
        ranks, device = [_kernels(each) for each in _profiles(folder / file)], load_device(name)
        result[name] = {bound: _fit(ranks, bound, form_of(device, bound)) for bound in _BOUNDS}
        slope, error, count = _of_collectives(ranks)
        print(
            f"{name}: collectives that overlap kernels: {slope:+.2f} +- {error:.2f} of their time, n {count}"
        )
    return result


def _of_collectives(ranks: Sequence[_Kernels]) -> tuple[float, float, int]:
    """Return the slope of the time of collectives, relative to the mean of their group, over the share that
    overlaps kernels; its standard error; and the number of collectives.
    """
    times: list[FloatArray] = []
    shares: list[FloatArray] = []
    for rows in _by_key(ranks, talks=True).values():
        if len(rows) > 2:
            times.append(rows[:, 0] / rows[:, 0].mean() - 1.0)
            shares.append(rows[:, 1] - rows[:, 1].mean())
    time, share = np.concatenate(times), np.concatenate(shares)
    slope = float((time * share).sum() / (share**2).sum())
    left = time - slope * share
    return slope, float(np.sqrt((left**2).sum() / (share**2).sum() / max(len(time) - 1, 1))), len(time)


def pooled(fits: Sequence[Fitted]) -> tuple[float, float]:
    """Return the random-effects mean of factors (DerSimonian and Laird) and its prediction error for a new
    device.
    """
    value, variance = np.array([fit.value for fit in fits]), np.array([fit.std_error**2 for fit in fits])
    weight = 1.0 / variance
    mean = float((weight * value).sum() / weight.sum())
    excess = float((weight * (value - mean) ** 2).sum()) - (len(fits) - 1)
    between = (
        max(excess / float(weight.sum() - (weight**2).sum() / weight.sum()), 0.0) if len(fits) > 1 else 0.0
    )
    weight = 1.0 / (variance + between)
    return float((weight * value).sum() / weight.sum()), float(np.sqrt(between + 1.0 / weight.sum()))


def main() -> int:
    """Print the fits and the errors of held-out predictions. Return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=_FOLDER, help="folder with the traces")
    fits = fitted(parser.parse_args().folder)
    if not fits:
        print("no traces to fit: pass the folder with the traces as FOLDER")
        return 0
    for bound in _BOUNDS:
        for name, each in fits.items():
            fit, form = each[bound], form_of(load_device(name), bound)
            others = [every[bound] for other, every in fits.items() if other != name]
            pooled_factor = pooled(others)[0] if others else np.nan
            fit_text = f"{name} {bound}: factor {fit.value:.2f} +- {fit.std_error:.2f}"
            measured = fit.alone_ns + fit.added_ns
            without = fit.alone_ns / measured - 1
            held_out = (1 + max(pooled_factor, 0.0) * form) * fit.alone_ns / measured - 1
            print(
                f"{fit_text}, n {fit.n:,} in {fit.keys} groups;"
                f" overlapped {measured / fit.alone_ns - 1:+.1%};"
                f" held out {held_out:+.1%}, without interference {without:+.1%}"
            )
        value, error = pooled([each[bound] for each in fits.values()])
        print(f"* {bound}: factor {value:.2f} +- {error:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
