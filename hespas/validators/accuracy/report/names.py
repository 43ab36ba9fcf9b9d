"""Names that a page shows, each stored once, together within a bound."""

from __future__ import annotations

from hespas.validators.accuracy.report.texts import shown

__all__ = ["Names"]

_LIMITS = (400, 240, 160, 100, 60, 30)
_MOST_BYTES = 1_600_000


class Names:
    """Hands out a row per distinct name; :meth:`texts` are the names as they are shown."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def row(self, name: str) -> int:
        """The row of a name, a new one for a new name."""
        return self._rows.setdefault(name, len(self._rows))

    def texts(self, most_bytes: int = _MOST_BYTES) -> list[str]:
        """The names, visible and cut as little as keeps all of them within ``most_bytes`` of JSON (the last
        limit holds whatever that makes).
        """
        texts: list[str] = []
        for limit in _LIMITS:
            texts = [shown(name, limit) for name in self._rows]
            if sum(map(_json_bytes, texts)) <= most_bytes:
                break
        return texts


def _json_bytes(text: str) -> int:
    """Bytes of a text in the JSON of a page, where ``<``, ``>`` and ``&`` take six each."""
    escaped = 5 * sum(map(text.count, "<>&")) + sum(map(text.count, '"\\'))
    return len(text.encode("utf-8", "replace")) + escaped + 3
