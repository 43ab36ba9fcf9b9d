"""Small decoder-only transformer over flattened graphs, in numpy.

The input of a position is the last token, the three newest frontier entries, the length of the frontier and
the number of nodes that are still wanted. The output is a distribution over the next token, limited to tokens
that the frontier admits, so that every completed sample is an acyclic graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hespas.generators.synth.sequences import Frontier, Token
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Transformer"]

_Array = NDArray[np.floating[Any]]
_HEADS, _FEEDFORWARD = 4, 2
_SHOWN_ENTRIES, _MOST_PENDING, _MOST_ENTRIES, _SIZE_BUCKETS = 3, 9, 16, 64
_LONGEST = 1.25
_MOST_MASKS = 10_000
_BATCH_TOKENS = 1024
_LEARNING_RATE, _MOMENTUM, _SQUARES = 3e-3, 0.9, 0.98


class Transformer:
    """Model fitted to token sequences. ``dimension`` is the size of the hidden state."""

    def __init__(
        self,
        sequences: Sequence[Sequence[Token]],
        *,
        epochs: int = 20,
        dimension: int = 64,
        layers: int = 2,
        seed: int = 0,
    ) -> None:
        self._ids: dict[Token, int] = {}
        for tokens in sequences:
            for token in tokens:
                self._ids.setdefault(token, len(self._ids))
        self._tokens = list(self._ids)
        self._end = len(self._tokens)  # also the token before the first one
        kinds = 1 + max(token.type for token in self._tokens)
        parents: dict[tuple[tuple[int, int], ...], int] = {}
        self._parents = np.array([parents.setdefault(token.parents, len(parents)) for token in self._tokens])
        self._examples = [Token(0, 0, row) for row in parents]
        self._masks: dict[tuple[int, ...], BoolArray] = {}
        rng = np.random.default_rng(seed)
        self._layers = layers

        def matrix(rows: int, columns: int, scale: float) -> _Array:
            return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

        self._entry_rows = kinds * _MOST_PENDING + 1
        rows = self._end + 1 + _SHOWN_ENTRIES * self._entry_rows + _MOST_ENTRIES + _SIZE_BUCKETS
        self.weights: dict[str, _Array] = {"embedding": matrix(rows, dimension, 0.3)}
        for layer in range(layers):
            scale = dimension**-0.5
            self.weights |= {
                f"attention{layer}": matrix(dimension, 3 * dimension, scale),
                f"projection{layer}": matrix(dimension, dimension, scale / (2 * layers) ** 0.5),
                f"inner{layer}": matrix(dimension, _FEEDFORWARD * dimension, scale),
                f"outer{layer}": matrix(_FEEDFORWARD * dimension, dimension, scale / (4 * layers) ** 0.5),
            }
        self.weights["logits"] = matrix(dimension, self._end + 1, dimension**-0.5)
        self.weights["bias"] = np.zeros((1, self._end + 1), np.float32)
        self.losses = list(self._train(sequences, epochs, rng))

    def drafts(self, random: Random, nodes: int, deviations: Sequence[float]) -> list[list[Token] | None]:
        """Return the tokens of graphs of about ``nodes`` nodes, or None for drafts that do not end. The
        temperature of each is 0.7 + ``deviation``.
        """
        count = len(deviations)
        frontiers = [Frontier() for _ in range(count)]
        drafts: list[list[int]] = [[] for _ in range(count)]
        open_rows = set(range(count))
        last = np.full(count, self._end)
        longest = int(_LONGEST * nodes) + 8
        cache = self.empty_cache(count, longest)
        temperatures = 0.7 + np.array(deviations)[:, None]
        for step in range(longest):
            inputs = np.array(
                [
                    self._inputs(token, frontier, nodes - step)
                    for token, frontier in zip(last.tolist(), frontiers, strict=True)
                ]
            )
            allowed = np.array([self._allowed(frontier) for frontier in frontiers])
            logits = np.where(allowed, self.next_logits(inputs, step, cache) / temperatures, -1e9)
            noise = np.array([[random.random()] for _ in range(count)])
            shares = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)) * allowed, axis=1)
            # A row without an allowed token cannot be completed and ends too.
            chosen = (shares <= noise * shares[:, -1:]).sum(axis=1)
            for row in sorted(open_rows):
                token = int(chosen[row])
                if token >= self._end or not allowed[row, token]:
                    open_rows.discard(row)
                    continue
                frontiers[row].append(step, self._tokens[token])
                drafts[row].append(token)
            if not open_rows:
                break
            last = np.minimum(chosen, self._end)
        return [
            [self._tokens[token] for token in draft]
            if draft and row not in open_rows and not len(frontiers[row])
            else None
            for row, draft in enumerate(drafts)
        ]

    def _inputs(self, token: int, frontier: Frontier, missing: int) -> list[int]:
        """Return the rows of the embedding whose sum is the input of a position."""
        rows, base = [token], self._end + 1
        for slot in range(_SHOWN_ENTRIES):
            if slot < len(frontier):
                pending = min(frontier.pending[-1 - slot], _MOST_PENDING) - 1
                rows.append(base + frontier.types[-1 - slot] * _MOST_PENDING + pending)
            else:
                rows.append(base + self._entry_rows - 1)
            base += self._entry_rows
        rows.append(base + min(len(frontier), _MOST_ENTRIES - 1))
        bucket = missing if missing < 32 else 32 + int(6 * log(missing / 32))
        rows.append(base + _MOST_ENTRIES + min(max(bucket, 0), _SIZE_BUCKETS - 1))
        return rows

    def _allowed(self, frontier: Frontier) -> BoolArray:
        """Return the mask of tokens that the frontier admits. The end needs an empty frontier."""
        types = tuple(frontier.types)
        if types not in self._masks:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            admitted = np.array([frontier.admits(token) for token in self._examples])
            self._masks[types] = np.append(admitted[self._parents], not types)
        return self._masks[types]

    def example(self, tokens: Sequence[Token]) -> tuple[IntArray, IntArray, BoolArray]:
        """Return the inputs, the wanted outputs and the allowed outputs of all positions of a sequence."""
        frontier = Frontier()
        inputs, allowed, last = list[list[int]](), list[BoolArray](), self._end
        for step, token in enumerate(tokens):
            inputs.append(self._inputs(last, frontier, len(tokens) - step))
            allowed.append(self._allowed(frontier))
            last = self._ids[token]
            frontier.append(step, token)
        inputs.append(self._inputs(last, frontier, 0))
        allowed.append(self._allowed(frontier))
        targets = np.array([*(self._ids[token] for token in tokens), self._end])
        return np.array(inputs), targets, np.array(allowed)

    def _train(
        self, sequences: Sequence[Sequence[Token]], epochs: int, rng: np.random.Generator
    ) -> Iterator[float]:
        """Yield the mean loss per token of each epoch, in nats."""
        rows = [self.example(tokens) for tokens in sequences]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row][1]))
        batches: list[list[int]] = [[]]
        for row in order:
            if batches[-1] and len(rows[row][1]) * (len(batches[-1]) + 1) > _BATCH_TOKENS:
                batches.append([])
            batches[-1].append(row)
        means = {name: np.zeros_like(value) for name, value in self.weights.items()}
        squares = {name: np.zeros_like(value) for name, value in self.weights.items()}
        steps, total_steps = 0, epochs * len(batches)
        for _ in range(epochs):
            total, count = 0.0, 0
            for batch in map(int, rng.permutation(len(batches))):
                loss, batch_tokens, gradients = self.gradients([rows[row] for row in batches[batch]])
                total, count, steps = total + loss, count + batch_tokens, steps + 1
                norm = float(np.sqrt(sum(float((value**2).sum()) for value in gradients.values())))
                rate = _LEARNING_RATE * min(steps / 50, 1.0) * (1.0 - (steps - 1) / total_steps)
                for name, gradient in gradients.items():
                    value = gradient / max(norm, 1.0)
                    means[name] += (1 - _MOMENTUM) * (value - means[name])
                    squares[name] += (1 - _SQUARES) * (value**2 - squares[name])
                    mean = means[name] / (1 - _MOMENTUM**steps)
                    square = squares[name] / (1 - _SQUARES**steps)
                    self.weights[name] -= (rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
            yield total / count

    def gradients(
        self, rows: Sequence[tuple[IntArray, IntArray, BoolArray]]
    ) -> tuple[float, int, dict[str, _Array]]:
        """Return the sum of the losses, the number of tokens, and the gradients of the mean loss."""
        weights, longest = self.weights, max(len(targets) for _, targets, _ in rows)
        inputs = np.zeros((len(rows), longest, _SHOWN_ENTRIES + 3), dtype=np.int64)
        targets = np.full((len(rows), longest), self._end)
        allowed = np.ones((len(rows), longest, self._end + 1), dtype=np.bool_)
        present = np.zeros((len(rows), longest), dtype=np.bool_)
        for index, (row_inputs, row_targets, row_allowed) in enumerate(rows):
            length = len(row_targets)
            inputs[index, :length], targets[index, :length] = row_inputs, row_targets
            allowed[index, :length], present[index, :length] = row_allowed, True
        dimension = weights["embedding"].shape[1]
        state: _Array = weights["embedding"][inputs].sum(axis=2) + _positions(0, longest, dimension)
        future = np.triu(np.full((longest, longest), -1e9, np.float32), 1)
        saved: list[tuple[Any, ...]] = []
        for layer in range(self._layers):
            normal, scale = _normalised(state)
            query, key, value = (
                _split(part) for part in np.split(normal @ weights[f"attention{layer}"], 3, axis=2)
            )
            attention = _softmax(query @ key.swapaxes(2, 3) * query.shape[3] ** -0.5 + future)
            mixed = _joined(attention @ value)
            state = state + mixed @ weights[f"projection{layer}"]
            second, second_scale = _normalised(state)
            inner = np.maximum(second @ weights[f"inner{layer}"], 0)
            state = state + inner @ weights[f"outer{layer}"]
            saved.append((normal, scale, query, key, value, attention, mixed, second, second_scale, inner))
        final, final_scale = _normalised(state)
        logits = np.where(allowed, final @ weights["logits"] + weights["bias"], np.float32(-1e9))
        shares = _softmax(logits)
        chosen = np.take_along_axis(shares, targets[:, :, None], axis=2)[:, :, 0]
        loss, count = float(-np.log(chosen[present] + 1e-30).sum()), int(present.sum())
        change = shares
        np.put_along_axis(change, targets[:, :, None], (chosen - 1)[:, :, None], axis=2)
        change *= (present / count).astype(np.float32)[:, :, None]
        gradients = {"logits": _outer(final, change), "bias": change.sum(axis=(0, 1))[None]}
        grown = _normalised_gradient(final, final_scale, change @ weights["logits"].T)
        for layer in range(self._layers - 1, -1, -1):
            normal, scale, query, key, value, attention, mixed, second, second_scale, inner = saved[layer]
            gradients[f"outer{layer}"] = _outer(inner, grown)
            change = grown @ weights[f"outer{layer}"].T * (inner > 0)
            gradients[f"inner{layer}"] = _outer(second, change)
            grown = grown + _normalised_gradient(second, second_scale, change @ weights[f"inner{layer}"].T)
            gradients[f"projection{layer}"] = _outer(mixed, grown)
            change = _split(grown @ weights[f"projection{layer}"].T)
            scores = change @ value.swapaxes(2, 3)
            scores = attention * (scores - (scores * attention).sum(axis=3, keepdims=True))
            scores *= query.shape[3] ** -0.5
            parts = (scores @ key, scores.swapaxes(2, 3) @ query, attention.swapaxes(2, 3) @ change)
            change = np.concatenate([_joined(part) for part in parts], axis=2)
            gradients[f"attention{layer}"] = _outer(normal, change)
            grown = grown + _normalised_gradient(normal, scale, change @ weights[f"attention{layer}"].T)
        gradients["embedding"] = np.zeros_like(weights["embedding"])
        grown *= present[:, :, None]
        for column in range(inputs.shape[2]):
            np.add.at(gradients["embedding"], inputs[:, :, column], grown)
        return loss, count, gradients

    def empty_cache(self, count: int, longest: int) -> _Array:
        """Return the memory of keys and values for ``next_logits``."""
        hidden = self.weights["embedding"].shape[1]
        return np.zeros((2 * self._layers, count, _HEADS, longest, hidden // _HEADS), np.float32)

    def next_logits(self, inputs: IntArray, step: int, cache: _Array) -> _Array:
        """Return the logits of one position of a batch. The keys and values are added to ``cache``."""
        weights: Mapping[str, _Array] = self.weights
        dimension = weights["embedding"].shape[1]
        state = weights["embedding"][inputs].sum(axis=1)[:, None] + _positions(step, 1, dimension)
        for layer in range(self._layers):
            normal, _ = _normalised(state)
            query, key, value = (
                _split(part) for part in np.split(normal @ weights[f"attention{layer}"], 3, axis=2)
            )
            cache[2 * layer, :, :, step], cache[2 * layer + 1, :, :, step] = key[:, :, 0], value[:, :, 0]
            keys, values = cache[2 * layer, :, :, : step + 1], cache[2 * layer + 1, :, :, : step + 1]
            attention = _softmax(query @ keys.swapaxes(2, 3) * query.shape[3] ** -0.5)
            state = state + _joined(attention @ values) @ weights[f"projection{layer}"]
            second, _ = _normalised(state)
            state = state + np.maximum(second @ weights[f"inner{layer}"], 0) @ weights[f"outer{layer}"]
        final, _ = _normalised(state)
        logits: _Array = (final @ weights["logits"] + weights["bias"])[:, 0]
        return logits


def _positions(start: int, count: int, dimension: int) -> _Array:
    """Return sines and cosines of the positions."""
    angles = np.arange(start, start + count)[:, None] / 1000.0 ** np.linspace(0, 1, dimension // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32) * np.float32(0.3)


def _normalised(state: _Array) -> tuple[_Array, _Array]:
    """Return the state with mean 0 and variance 1, and its scale."""
    centred = state - state.mean(axis=2, keepdims=True)
    scale: _Array = 1.0 / np.sqrt((centred**2).mean(axis=2, keepdims=True) + np.float32(1e-5))
    return centred * scale, scale


def _normalised_gradient(normal: _Array, scale: _Array, change: _Array) -> _Array:
    along = (change * normal).mean(axis=2, keepdims=True)
    gradient: _Array = scale * (change - change.mean(axis=2, keepdims=True) - normal * along)
    return gradient


def _softmax(scores: _Array) -> _Array:
    shares: _Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def _split(state: _Array) -> _Array:
    """Return an array (batch, head, position, hidden / heads) of an array (batch, position, hidden)."""
    batch, length, hidden = state.shape
    return state.reshape(batch, length, _HEADS, hidden // _HEADS).swapaxes(1, 2)


def _joined(heads: _Array) -> _Array:
    batch, count, length, hidden = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, length, count * hidden)


def _outer(left: _Array, right: _Array) -> _Array:
    """Return the gradient of a weight from its input and the gradient of its output."""
    gradient: _Array = left.reshape(-1, left.shape[2]).T @ right.reshape(-1, right.shape[2])
    return gradient
