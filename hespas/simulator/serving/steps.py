"""Time of a serving step: interpolation between times at the points of a grid (lattice).

A step processes ``tokens``, of which some are sampled, decodes some sequences and processes some prompts. Its
kernels run one after the other, so its time is a sum of four parts: token-wise kernels, the head, attention
of decoding sequences, and attention of prompts. Between grid points, times are interpolated linearly in each
size, because kernel times are linear between two sizes with equal numbers of tiles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.simulator.serving.requests import StepLog

__all__ = ["SHARES", "Correction", "Drafts", "StepGrids", "StepTimes"]

_DECODED, _PROMPTED = 256.0, 2048.0
"""Steps with up to 256 tokens run the kernels of decoding, steps with 2048 tokens and more those of
prompts.
"""
SHARES = ("products", "experts", "attention", "collectives", "others")
"""Parts of the time of a step. Products of experts are grouped and run on kernels of their own."""


class StepGrids(Protocol):
    """Protocol of the grids of step sizes at which kernels are estimated: ascending grid points for each size
    of a step.
    """

    @property
    def tokens(self) -> Sequence[int]:
        """Return grid points of the number of tokens in a step."""
        ...

    @property
    def rows(self) -> Sequence[int]:
        """Return grid points of the number of sampled tokens."""
        ...

    @property
    def batch(self) -> Sequence[int]:
        """Return grid points of the number of decoding sequences."""
        ...

    @property
    def context(self) -> Sequence[int]:
        """Return grid points of the cached tokens per decoding sequence."""
        ...

    @property
    def prompts(self) -> Sequence[int]:
        """Return grid points of the number of prompts in a step."""
        ...

    @property
    def length(self) -> Sequence[int]:
        """Return grid points of the new tokens per prompt."""
        ...

    @property
    def before(self) -> Sequence[int]:
        """Return grid points of the cached tokens before the new tokens of a prompt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Effects of a serving engine that kernel estimates do not include.

    ``products``, ``attention``, ``collectives`` and ``others`` are factors on the times of :data:`SHARES`.
    ``routed`` is an additional factor on matmuls of experts. ``prefill`` is an additional factor on kernels
    that process prompts; for matmuls of experts it is multiplied by ``experts``.

    ``step_ns``, ``sequence_ns`` and ``prompt_ns`` are host times per step, per sequence and per prompt [ns].
    ``request_ns`` is the time of a request outside of steps (tokenizer, transport) [ns]. ``launch_ns`` is the
    host time per kernel launch [ns]: steps with prompts take at least the time of their launches, decoding
    steps are launched as one graph. ``accepts`` is the probability that a speculative token is accepted.
    """

    products: float = 1.0
    attention: float = 1.0
    collectives: float = 1.0
    others: float = 1.0
    step_ns: float = 0.0
    sequence_ns: float = 0.0
    prompt_ns: float = 0.0
    request_ns: float = 0.0
    launch_ns: float = 0.0
    routed: float = 1.0
    prefill: float = 1.0
    experts: float = 1.0
    accepts: float = 0.8

    @property
    def factors(self) -> FloatArray:
        """Return the factors on :data:`SHARES`, shape ``(shares,)``."""
        experts = self.products * self.routed
        return np.array([self.products, experts, self.attention, self.collectives, self.others])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """Speculative decoding (arXiv 2211.17192): ``tokens`` speculative tokens per sequence and step.

    A draft model, or an additional layer of the model, generates them in steps with the ``times``, and
    processes all prompts too (None: they take no time).

    ``acceptance`` has the probability that each speculative token is accepted, shape ``(tokens,)`` (empty:
    from the :class:`Correction`).
    """

    tokens: int
    times: StepTimes | None = None
    acceptance: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Times of the kernels of a step at grid points [ns]. The first dimension of each table is
    :data:`SHARES`.

    ``of_tokens`` and ``of_rows`` have shape ``(shares, points)``, ``of_decode`` has ``(shares, batch,
    context)``, ``of_prompts`` has ``(shares, prompts, length, before)``. ``kernels`` is the number of
    launches in a step with prompts. A step with at most ``captured`` tokens is launched as one graph.
    ``drafts`` are the speculative tokens of each step.

    ``by_basis`` has the same four tables for the times of each basis of estimates in ``bases``
    (:class:`~hespas.graph.Estimate`), as an additional first dimension. Their sums are the tables.

    ``floors`` are four tables with the shortest times that the device permits; no correction makes a share
    faster (empty: no limit).
    """

    grids: StepGrids
    of_tokens: FloatArray
    of_rows: FloatArray
    of_decode: FloatArray
    of_prompts: FloatArray
    correction: Correction = Correction()
    kernels: float = 0.0
    captured: int = 0
    drafts: Drafts = Drafts(tokens=0)
    bases: tuple[str, ...] = ()
    by_basis: tuple[FloatArray, ...] = ()
    floors: tuple[FloatArray, ...] = ()

    @property
    def queries(self) -> int:
        """Return the number of tokens that a step processes for a decoding sequence."""
        return 1 + self.drafts.tokens

    @property
    def gain(self) -> float:
        """Return the expected number of tokens that a step generates for a sequence. Speculative tokens count
        up to the first rejected one.
        """
        if self.drafts.acceptance:
            return 1.0 + sum(self.drafts.acceptance)
        return float(sum(self.correction.accepts**position for position in range(self.queries)))

    def corrected(self, correction: Correction) -> StepTimes:
        """Return the same estimates with another correction. The draft model runs without host times of its
        own, in the steps of the model.
        """
        drafts = self.drafts
        if drafts.times is not None:
            alone = replace(
                correction, step_ns=0.0, sequence_ns=0.0, prompt_ns=0.0, request_ns=0.0, launch_ns=0.0
            )
            drafts = replace(drafts, times=drafts.times.corrected(alone))
        return replace(self, correction=correction, drafts=drafts)

    @cached_property
    def _tables(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return the corrected times of the four parts of a step, summed over shares."""
        factors, prefill = self.correction.factors, self.correction.prefill
        tokens = np.log2(np.array(self.grids.tokens) / _DECODED) / np.log2(_PROMPTED / _DECODED)
        part = np.clip(tokens, 0.0, 1.0)
        of_tokens = self.of_tokens * factors[:, None] * prefill**part
        of_tokens[SHARES.index("experts")] *= self.correction.experts**part
        of_rows = self.of_rows * factors[:, None]
        of_decode = self.of_decode * factors[:, None, None]
        of_prompts = self.of_prompts * factors[:, None, None, None] * prefill
        tables = (of_tokens, of_rows, of_decode, of_prompts)
        if self.floors:
            of_tokens, of_rows, of_decode, of_prompts = map(np.maximum, tables, self.floors)
        return of_tokens.sum(axis=0), of_rows.sum(axis=0), of_decode.sum(axis=0), of_prompts.sum(axis=0)

    @cached_property
    def _axes(self) -> dict[str, FloatArray]:
        names = ("tokens", "rows", "batch", "context", "prompts", "length", "before")
        return {name: np.array(getattr(self.grids, name), np.float64) for name in names}

    @cached_property
    def _points(self) -> dict[str, tuple[float, ...]]:
        """Return the grid points of each size as tuples of Python floats, for fast lookup of single
        values.
        """
        return {name: tuple(axis.tolist()) for name, axis in self._axes.items()}

    @cached_property
    def _lines_of_tokens(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the times by tokens and by sampled tokens, summed over shares with their factors, as tuples
        of Python floats.
        """
        by_tokens, by_rows = self._tables[:2]
        return tuple(by_tokens.tolist()), tuple(by_rows.tolist())

    def decode_ns(self, batch: int, context: FloatArray) -> FloatArray:
        """Return the times [ns] of steps in which ``batch`` sequences decode with a mean of ``context``
        cached tokens.
        """
        decoded = self._decoded_by(batch)
        return decoded.fixed_ns + _lines(self._axes["context"], decoded.row, context)

    @cached_property
    def _known_batches(self) -> dict[int, _DecodeTimes]:
        return {}

    @cached_property
    def _known_prompts(self) -> dict[int, list[list[float]]]:
        return {}

    def _decoded_by(self, batch: int) -> _DecodeTimes:
        """Return the decoding times of ``batch`` sequences as a function of their cached tokens."""
        decoded = self._known_batches.get(batch)
        if decoded is None:
            row = _row(self._points["batch"], self._tables[2], float(batch))
            fixed = self._of_decoded(batch, batch * self.queries) + self._sampled_ns(batch * self.queries)
            fixed += self.correction.step_ns + self.correction.sequence_ns * batch
            if self.drafts.times is not None:
                row = row + self.drafts.tokens * self.drafts.times._decoded_by(batch).row
            decoded = self._known_batches[batch] = _DecodeTimes(row, tuple(row.tolist()), fixed)
        return decoded

    def _prompted_ns(self, prompts: int, length: float, before: float) -> float:
        """Return the time of attention for ``prompts`` prompts with ``length`` new tokens each, after
        ``before`` cached tokens.
        """
        plane = self._known_prompts.get(prompts)
        if plane is None:
            plane = _row(self._points["prompts"], self._tables[3], prompts).tolist()
            self._known_prompts[prompts] = plane
        axis = self._points["length"]
        if len(axis) == 1:
            return _line(self._points["before"], plane[0], before)
        at, part = _grid_position(axis, length)
        low, high, part = plane[at], plane[at + 1], max(part, 0.0)
        first, further = _grid_position(self._points["before"], before)
        time = low[first] + part * (high[first] - low[first])
        if len(low) == 1:
            return time
        following = low[first + 1] + part * (high[first + 1] - low[first + 1])
        return time + max(further, 0.0) * (following - time)

    def step_ns(
        self, *, batch: int, context: float, prompts: int, new_tokens: int, before: float, sampled: int
    ) -> float:
        """Return the time of one step [ns].

        In the step, ``batch`` sequences with ``context`` cached tokens each decode. ``prompts`` prompts have
        ``new_tokens`` new tokens in total, after a mean of ``before`` cached tokens each. The step samples
        ``sampled`` tokens.
        """
        tokens = batch * self.queries + new_tokens
        time = self._of_decoded(batch, tokens)
        time += self._sampled_ns(max(sampled + batch * self.drafts.tokens, 1))
        if batch:
            time += _interpolated(self._points["context"], self._decoded_by(batch).values, context)
        if prompts:
            time += self._prompted_ns(prompts, new_tokens / prompts, before)
            if (draft := self.drafts.times) is not None:
                time += draft._of_decoded(0, new_tokens) + draft._sampled_ns(prompts)
                time += draft._prompted_ns(prompts, new_tokens / prompts, before)
            kernels = self.kernels + (0.0 if draft is None else draft.kernels)
            launch_ns = self.correction.launch_ns * kernels
            if tokens > self.captured and launch_ns:
                # Device and host work at once. If both are similar, each waits for the other at times.
                time = float((time**_OVERLAP + launch_ns**_OVERLAP) ** (1 / _OVERLAP))
        host = self.correction.step_ns + self.correction.sequence_ns * batch
        return time + host + self.correction.prompt_ns * prompts

    def basis_times_ns(self, logs: Iterable[StepLog]) -> Mapping[str, float]:
        """Return the kernel time of all steps of ``logs`` by basis of estimates [ns]."""
        return self._basis_times_ns(np.concatenate([log.sizes() for log in logs], axis=1))

    def _basis_times_ns(self, sizes: FloatArray) -> dict[str, float]:
        """Return the kernel time of steps by basis of estimates [ns]. ``sizes`` has the number of equal steps
        and their sizes, shape ``(7, steps)``.
        """
        count, batch, context, prompts, new_tokens, before, sampled = sizes
        decodes, prefills = batch > 0, prompts > 0
        tokens = batch * self.queries + new_tokens
        rows = np.maximum(sampled + batch * self.drafts.tokens, 1)
        length = new_tokens[prefills] / prompts[prefills]
        axes = self._axes
        weights = (
            _weights((axes["tokens"],), (tokens,), count),
            _weights((axes["rows"],), (rows,), count),
            _weights((axes["batch"], axes["context"]), (batch[decodes], context[decodes]), count[decodes]),
            _weights(
                (axes["prompts"], axes["length"], axes["before"]),
                (prompts[prefills], length, before[prefills]),
                count[prefills],
            ),
        )
        time_ns: dict[str, float] = {}
        for number, basis in enumerate(self.bases):
            of_tokens, of_rows, of_decode, of_prompts = (table[number] for table in self.by_basis)
            part = replace(
                self,
                of_tokens=of_tokens,
                of_rows=of_rows,
                of_decode=of_decode,
                of_prompts=of_prompts,
                floors=(),
            )
            tables = zip(weights, part._tables, strict=True)
            time_ns[basis] = sum(float((weight * table).sum()) for weight, table in tables)
        if self.drafts.times is not None:
            none = np.zeros_like(count)
            guessed = (count * self.drafts.tokens * decodes, batch, context, none, none, none, batch)
            prompted = (count * prefills, none, none, prompts, new_tokens, before, prompts)
            parts = np.concatenate([np.array(part)[:, part[0] > 0] for part in (guessed, prompted)], axis=1)
            for basis, drafted_ns in self.drafts.times._basis_times_ns(parts).items():
                time_ns[basis] = time_ns.get(basis, 0.0) + drafted_ns
        return time_ns

    def _of_decoded(self, batch: int, tokens: int) -> float:
        """Return the time [ns] of the kernels that depend only on the number of tokens, plus the time to
        generate the speculative tokens of ``batch`` sequences.
        """
        axis, table = self._points["tokens"], self._lines_of_tokens[0]
        time = _line(axis, table, float(tokens))
        if self.drafts.times is not None and batch:
            time += self.drafts.tokens * self.drafts.times._decoded_by(batch).fixed_ns
        return time

    def _sampled_ns(self, rows: int) -> float:
        return _line(self._points["rows"], self._lines_of_tokens[1], float(rows))


_OVERLAP = 4


def _grid_position(axis: Sequence[float], value: float) -> tuple[int, float]:
    """Return the grid interval of a value: the index of the last grid point that is not above it, and its
    relative position between that point and the next. The position is below 0 or above 1 for values beyond
    the grid.
    """
    if len(axis) == 1:
        return 0, 0.0
    at = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def _weights(axes: Sequence[FloatArray], values: Sequence[FloatArray], counts: FloatArray) -> FloatArray:
    """Return the total weight of each grid point in the interpolations at ``values``, which occur ``counts``
    times. ``axes`` has the grid points of each dimension. Weights are as in :func:`_row`.
    """
    weights = np.zeros(tuple(map(len, axes)))
    corners: list[tuple[tuple[IntArray, FloatArray], tuple[IntArray, FloatArray]]] = []
    for axis, value in zip(axes, values, strict=True):
        low = np.clip(np.searchsorted(axis, value, side="right") - 1, 0, max(len(axis) - 2, 0))
        high = np.minimum(low + 1, len(axis) - 1)
        width = np.where(high > low, axis[high] - axis[low], np.inf)
        part = np.maximum((value - axis[low]) / width, 0.0)
        corners.append(((low, 1.0 - part), (high, part)))
    for corner in product(*corners):
        weight = np.prod([factor for _, factor in corner], axis=0)
        np.add.at(weights, tuple(index for index, _ in corner), weight * counts)
    return weights


def _row(axis: Sequence[float], table: FloatArray, value: float) -> FloatArray:
    """Return a table, interpolated linearly at ``value`` of its first dimension. ``axis`` has the grid points
    of that dimension. Below the first grid point, the first row of the table is returned.
    """
    at, part = _grid_position(axis, value)
    part = max(part, 0.0)
    if len(axis) == 1:
        return np.asarray(table[0], np.float64)
    return np.asarray(table[at] + part * (table[at + 1] - table[at]), np.float64)


def _line(axis: Sequence[float], values: Sequence[float], value: float) -> float:
    """Return a one-dimensional table interpolated at a value, as in :func:`_row`."""
    at, part = _grid_position(axis, value)
    if len(axis) == 1:
        return values[0]
    return values[at] + max(part, 0.0) * (values[at + 1] - values[at])


def _lines(axis: FloatArray, values: FloatArray, at: FloatArray) -> FloatArray:
    """Return interpolated values of a one-dimensional table. Beyond the last grid point, the last piece is
    extrapolated.
    """
    if len(axis) == 1:
        return np.full(len(at), values[0])
    inside: FloatArray = np.interp(at, axis, values)
    if at.max(initial=0.0) <= axis[-1]:
        return inside
    slope = (values[-1] - values[-2]) / (axis[-1] - axis[-2])
    return np.asarray(inside + slope * np.maximum(at - axis[-1], 0.0), np.float64)


def _interpolated(axis: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the same result as :func:`_lines` for a single value, with the arithmetic of
    ``numpy.interp``.
    """
    if len(axis) == 1 or at <= axis[0]:
        return values[0]
    index = min(bisect_right(axis, at), len(axis) - 1) - 1
    slope = (values[index + 1] - values[index]) / (axis[index + 1] - axis[index])
    if at < axis[-1]:
        return slope * (at - axis[index]) + values[index]
    return values[-1] + slope * (at - axis[-1])


class _DecodeTimes(NamedTuple):
    """Times of attention in decoding steps at the grid points of the cached tokens, as an array and as Python
    floats. ``fixed_ns`` is the time of the rest of a step without prompts.
    """

    row: FloatArray
    values: tuple[float, ...]
    fixed_ns: float
