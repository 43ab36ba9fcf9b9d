"""n-gram model of flattened graphs that continues training graphs and changes between them.

A draft copies the tokens of a training graph of about the wanted size. After each token it leaves that graph
with probability ``deviation``: it continues at a position of another training graph that has the same
frontier and is preceded by the same tokens, but is followed by another token. The longest history that offers
such a position is used (6, 3, 1 or 0 tokens). Equal frontiers keep the types of all parents and the number of
children of each node, so local structure comes from training graphs, but the graph as a whole is new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import exp
from random import Random

from hespas.generators.synth.sequences import SIGNATURE_ENTRIES, Frontier, Signature, Token

__all__ = ["FrontierNgram"]

_ORDERS = (6, 3, 1, 0)
_SIZE_TOLERANCE = 0.08
_LONGEST = 1.5
_MOST_POSITIONS = 128
"""Positions of a context that are compared; more are sampled."""

_Context = tuple[int, Signature, tuple[int, ...]]
_Position = tuple[int, int]


class FrontierNgram:
    """Model fitted to token sequences."""

    def __init__(self, sequences: Sequence[Sequence[Token]]) -> None:
        self._sequences = [tuple(tokens) for tokens in sequences]
        self._longest = max(len(tokens) for tokens in sequences)
        self._ids: dict[Token, int] = {}
        self._positions: dict[_Context, list[_Position]] = defaultdict(list)
        for row, tokens in enumerate(self._sequences):
            frontier = Frontier()
            history: list[int] = []
            for index, token in enumerate(tokens):
                frontier.append(index, token)
                history.append(self._ids.setdefault(token, len(self._ids)))
                for context in _contexts(frontier, history):
                    self._positions[context].append((row, index + 1))

    def drafts(self, random: Random, nodes: int, deviations: Sequence[float]) -> list[list[Token] | None]:
        """Return the tokens of a graph of about ``nodes`` nodes for each deviation, or None for drafts that
        cannot be completed. After each token, the deviation is the probability to continue in another graph.
        """
        return [self._draft(random, nodes, deviation) for deviation in deviations]

    def _draft(self, random: Random, nodes: int, deviation: float) -> list[Token] | None:
        scale = _SIZE_TOLERANCE * min(nodes, self._longest) + 1
        weights = [exp(-min(abs(len(tokens) - nodes) / scale, 500.0)) for tokens in self._sequences]
        row, index = random.choices(range(len(weights)), weights)[0], 0
        frontier = Frontier()
        history: list[int] = []
        tokens: list[Token] = []
        while True:
            source = self._sequences[row]
            is_end = index == len(source)
            fits = not len(frontier) if is_end else frontier.admits(source[index])
            if tokens and (not fits or random.random() < deviation):
                if other := self._other_position(random, frontier, history, (row, index), nodes):
                    row, index = other
                    source = self._sequences[row]
                elif not fits:
                    return None
            if index == len(source):
                return tokens
            if len(tokens) > _LONGEST * nodes + 16:
                return None
            frontier.append(len(tokens), source[index])
            tokens.append(source[index])
            history.append(self._ids[source[index]])
            index += 1

    def _token(self, position: _Position) -> Token | None:
        """Return the token at a position, None for the end of the graph."""
        tokens = self._sequences[position[0]]
        return tokens[position[1]] if position[1] < len(tokens) else None

    def _other_position(
        self, random: Random, frontier: Frontier, history: list[int], current: _Position, nodes: int
    ) -> _Position | None:
        """Return a position with the same frontier and another next token. Positions that lead to a graph of
        the wanted size are preferred.
        """
        followed = self._token(current)
        scale = _SIZE_TOLERANCE * min(nodes, self._longest) + 1
        missing = nodes - len(history)
        is_whole = len(frontier) < SIGNATURE_ENTRIES  # equal signatures are equal frontiers
        error = abs(len(self._sequences[current[0]]) - current[1] - missing)
        for context in _contexts(frontier, history):
            positions = self._positions.get(context, [])
            if len(positions) > _MOST_POSITIONS:
                positions = random.sample(positions, _MOST_POSITIONS)
            errors: list[float] = []
            others: list[_Position] = []
            for position in positions:
                left = len(self._sequences[position[0]]) - position[1]
                other_error = abs(left - missing)
                token = self._token(position)
                if other_error > error + 3 * scale or token == followed:
                    continue
                if is_whole or (not len(frontier) if token is None else frontier.admits(token)):
                    others.append(position)
                    errors.append(other_error)
            if others:
                least = min(errors)
                weights = [exp(-min((other - least) / scale, 500.0)) for other in errors]
                return random.choices(others, weights)[0]
        return None


def _contexts(frontier: Frontier, history: Sequence[int]) -> list[_Context]:
    """List the contexts of the next token, the longest history first."""
    signature = frontier.signature()
    return [
        (order, signature, tuple(history[len(history) - order :]))
        for order in _ORDERS
        if order <= len(history)
    ]
