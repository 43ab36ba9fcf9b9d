"""Noise of analog accelerators in a program: how its output and accuracy change. :mod:`.run` starts the child
process :mod:`.child`, and both exchange the messages of this module.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["KINDS", "NoiseJob", "NoiseKind", "NoisePoint", "NoiseRun", "PointResult", "SiteUnit"]

NoiseKind = Literal["mac", "weight", "activation"]
KINDS: tuple[NoiseKind, ...] = ("mac", "weight", "activation")


class NoisePoint(msgspec.Struct, frozen=True):
    """One run of the program over all data: standard deviations of the noise in units, at all sites or at
    one (``site``, -1: all), and the seed.
    """

    mac: float = 0.0
    weight: float = 0.0
    activation: float = 0.0
    seed: int = 0
    site: int = -1

    def sigma(self, kind: NoiseKind) -> float:
        """Return the noise of a kind."""
        return {"mac": self.mac, "weight": self.weight, "activation": self.activation}[kind]


class NoiseJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the child process. ``single_sites`` are the points that it repeats at each site alone."""

    program: str
    data: str
    path: str
    dims: dict[str, int]
    unit: Literal["lsb", "std"]
    bits: int
    points: list[NoisePoint]
    single_sites: list[NoisePoint]


class SiteUnit(msgspec.Struct, frozen=True, kw_only=True):
    """Units of the noise at a contraction, by kind of noise, and their origins: a grid of values, the
    rounding of the result, a range divided by bits, or a standard deviation.
    """

    name: str
    units: dict[NoiseKind, float]
    origins: dict[NoiseKind, str]


class PointResult(msgspec.Struct, frozen=True):
    """Result of a point: the share of correct rows (-1: no labels), and the power of the output and of its
    error.
    """

    point: NoisePoint
    accuracy: float
    signal: float
    error: float


class NoiseRun(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the child process. ``nested`` is the number of contractions in branches and in loops that
    are not unrolled, which get no noise. ``rows`` is the number of evaluated rows. ``is_random`` is True for
    random inputs.
    """

    sites: list[SiteUnit]
    nested: int
    rows: int
    accuracy: float
    is_random: bool
    results: list[PointResult]
