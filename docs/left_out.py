"""How far the shipped learned models are from devices left out of the fit: a section of ``accuracy.md``."""

from __future__ import annotations

from collections.abc import Iterable

from hespas.estimators.learned.serialization import Card, cards_in, shipped_folder

__all__ = ["left_out_section", "shipped_cards"]

_TEXT = """## Devices left out

Errors of `learned` on devices of which no row was in the fit, from the cards of the shipped models. A sibling
is another device of the same family; where none was in the fit either, nothing like the device was known.
"""


def shipped_cards() -> list[Card]:
    """The cards of the models that come with the package, by name."""
    return sorted((card for _, card in cards_in(shipped_folder())), key=lambda card: card.name)


def left_out_section(cards: Iterable[Card]) -> str:
    """One line per model and devices left out of it; empty where no card tells of any."""
    lines = [
        f"| {card.name} | {', '.join(row.hardware)} | {'yes' if row.siblings else 'no'} | {row.n:,} "
        f"| {row.mape:.1%} | {row.median_ape:.1%} | {row.bias:+.1%} |\n"
        for card in cards
        for row in card.left_out
    ]
    if not lines:
        return ""
    head = "| model | left out | siblings in the fit | rows | MAPE | median | bias |\n"
    return "".join((_TEXT, "\n", head, "| --- " * 7, "|\n", *lines))
