"""The memory behind tensors: numbers for it, and how much of it is alive."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Storages"]


class Storages:
    """Numbers storages in order of first use. What is used before an operation made it stands since before
    the recording (state); the rest is made by the recorded operations and given back when nobody holds it.

    Numbers stay those of a storage after it is freed: memory that is used again gets a new one.
    """

    def __init__(self) -> None:
        self.state_bytes = 0
        self.live_bytes = 0
        """Made by recorded operations, or changed in size since, and not given back."""
        self._most = 0
        self._count = 0
        self._known: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._over = False

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once, state included."""
        return self.state_bytes + self._most

    def number(self, tensor: Any) -> int:
        """The storage of a tensor that an operation takes."""
        return self._row(tensor, is_state=True)[0]

    def made(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        """The storages among those of results that did not exist before."""
        rows = [self._row(each, is_state=False) for each in tensors]
        return tuple(dict.fromkeys(row for row, is_new in rows if is_new))

    def alias(self, results: Sequence[Any], sources: Sequence[Any]) -> None:
        """Take the memory of results for that of what they were made from: a wait gives its argument back,
        of which tensors without data make a copy.
        """
        for result, source in zip(results, sources, strict=False):
            storage = result.untyped_storage()
            if storage._cdata not in self._known:
                self._watch(storage, self.number(source), 0)

    @contextmanager
    def tracking(self, torch: Any) -> Generator[None]:
        """Follow what changes in size without an operation: FSDP gives gathered parameters back so."""
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            before = int(storage.nbytes())
            result = original(storage, size)
            self._resized(storage, before)
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original
            self._over = True

    def _row(self, tensor: Any, *, is_state: bool) -> tuple[int, bool]:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return -1, False
        known = self._known.get(storage._cdata)
        if known is not None:
            return known, False
        size = int(storage.nbytes())
        self._count += 1
        self._watch(storage, self._count - 1, size)
        if is_state:
            self.state_bytes += size
        else:
            self._grow(size)
        return self._count - 1, True

    def _watch(self, storage: Any, row: int, size: int) -> None:
        key = storage._cdata
        self._known[key], self._sizes[key] = row, size

        def gone(_: object) -> None:
            self._alive.pop(key, None)
            self._known.pop(key, None)
            freed = self._sizes.pop(key, 0)
            if not self._over:
                self.live_bytes -= freed

        self._alive[key] = weakref.ref(storage, gone)

    def _grow(self, size: int) -> None:
        self.live_bytes += size
        self._most = max(self._most, self.live_bytes)

    def _resized(self, storage: Any, before: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._count += 1
            self._watch(storage, self._count - 1, before)
            self.state_bytes += before
        size = int(storage.nbytes())
        grown = size - self._sizes[key]
        self._sizes[key] = size
        self._grow(grown)
