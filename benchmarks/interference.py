"""How much slower kernels run beside collectives: factors of :mod:`hespas.hardware.kernel_shares`.

``python -m benchmarks.interference FOLDER`` takes the traces of :data:`TRACES` that the folder has (archives
unpacked by themselves). A kernel by name, grid and shapes of its operands runs alone (under 2 % of its time
beside a collective) and beside one (over half): what it takes longer, over the median alone and the share of
its time beside, is summed over kernels and divided by what the form of
:mod:`hespas.simulator.interference` says with a factor of 1. Errors: standard deviations of 400 draws of
kinds of kernels. Held out: the time beside collectives as the mean of the other traces predicts it, against
what was measured, and against no interference. Collectives beside kernels: the slope of their time over the
share beside kernels, which waits for other ranks hide.
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
"""In the names of kernels that arithmetic limits; memory limits the others."""
_BOUNDS: tuple[Bound, ...] = ("compute", "memory")
_ALONE, _BESIDE, _SHORTEST_NS, _DRAWS = 0.02, 0.5, 2_000.0, 400


class _Kernels(NamedTuple):
    """Device work of one rank: what it is, how long it took, and for what share of that beside the other kind
    (collectives for kernels, kernels for collectives).
    """

    key: list[str]
    talks: BoolArray
    duration_ns: FloatArray
    beside: FloatArray


class Fitted(NamedTuple):
    """A factor of one trace; ``alone_ns`` is what its ``n`` kernels beside collectives take alone."""

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
    """Times and shares beside the other kind, ``(executions, 2)``."""
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
    """By what share a kernel takes longer with a factor of 1, while bytes move as fast as the links go."""
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
    """The factor of one trace."""
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
    """Per device of a trace in a folder, the factors of both bounds; prints what collectives show."""
    result: dict[str, dict[Bound, Fitted]] = {}
    for name, file in TRACES.items():
        if not (folder / file).exists():
            continue
        ranks, device = [_kernels(each) for each in _profiles(folder / file)], load_device(name)
        result[name] = {bound: _fit(ranks, bound, form_of(device, bound)) for bound in _BOUNDS}
        slope, error, count = _of_collectives(ranks)
        print(f"{name}: collectives beside kernels: {slope:+.2f} +- {error:.2f} of their time, n {count}")
    return result


def _of_collectives(ranks: Sequence[_Kernels]) -> tuple[float, float, int]:
    """The slope of the time of collectives over the share beside kernels, over the mean of their kind."""
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
    """The mean of factors with random effects (DerSimonian and Laird), and the error of one more device."""
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
    """Print the fits and how they predict each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=_FOLDER, help="with the traces")
    fits = fitted(parser.parse_args().folder)
    if not fits:
        print("no traces to fit: name the folder that has them")
        return 0
    for bound in _BOUNDS:
        for name, each in fits.items():
            fit, form = each[bound], form_of(load_device(name), bound)
            others = [every[bound] for other, every in fits.items() if other != name]
            told_by = pooled(others)[0] if others else np.nan
            told = f"{name} {bound}: factor {fit.value:.2f} +- {fit.std_error:.2f}"
            measured = fit.alone_ns + fit.added_ns
            without = fit.alone_ns / measured - 1
            held_out = (1 + max(told_by, 0.0) * form) * fit.alone_ns / measured - 1
            print(
                f"{told}, n {fit.n:,} of {fit.keys} kinds; {measured / fit.alone_ns - 1:+.1%} beside;"
                f" held out {held_out:+.1%}, without interference {without:+.1%}"
            )
        value, error = pooled([each[bound] for each in fits.values()])
        print(f"* {bound}: factor {value:.2f} +- {error:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
