"""Damage to bytes: flips, cuts, splices, lengths, tokens, nesting, gzip."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from random import Random

__all__ = ["MAX_BYTES", "damaged"]

_TOKENS = (
    b"0", b"-1", b"9223372036854775808", b"1e999", b"NaN", b"null", b"true", b'""', b"{}", b"[]", b"\\u0000",
    b"\xff\xfe", b"tensor<", b"dense<", b"replica_groups=", b"%0", b"@main", b"while", b"{{0,1}}", b"<=[8]",
)  # fmt: skip
_NESTING = (b"[", b"{", b"(", b'{"a":', b"tensor<", b"\x0a\x7f")
MAX_BYTES = 64_000


def _flip(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    for _count in range(rng.choice((1, 1, 2, 4, 16))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return data


def _bit(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _cut(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    return data[: rng.randrange(len(data))]


def _delete(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice((1, 2, 8, 64))]
    return data


def _repeat(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    start = rng.randrange(len(data))
    part = data[start : start + rng.choice((1, 4, 32, 256))]
    data[start:start] = part * rng.choice((1, 1, 3, 20))
    return data


def _splice(data: bytearray, rng: Random, seeds: Sequence[bytes]) -> bytearray:
    other = rng.choice(seeds)
    return data[: rng.randrange(len(data))] + other[rng.randrange(max(1, len(other))) :]


def _token(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data))
    data[at : at + rng.choice((0, 1, 4))] = rng.choice(_TOKENS)
    return data


def _number(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    """Another number where digits stand."""
    places = [place for place in range(len(data)) if 0x30 <= data[place] <= 0x39]
    if not places:
        return _flip(data, rng, ())
    at = rng.choice(places)
    data[at : at + 1] = rng.choice((b"0", b"-1", b"7", b"99999999999", b"18446744073709551615", b"1.5"))
    return data


def _varint(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    """A length or number of up to ten bytes, as protobuf writes them."""
    at = rng.randrange(len(data))
    data[at : at + 1] = bytes(
        [*(0x80 | rng.randrange(128) for _ in range(rng.randrange(10))), rng.randrange(128)]
    )
    return data


def _nest(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data))
    data[at:at] = rng.choice(_NESTING) * rng.choice((10, 200, 5000))
    return data


def _swap_lines(data: bytearray, rng: Random, _: Sequence[bytes]) -> bytearray:
    lines = bytes(data).split(b"\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return bytearray(b"\n".join(lines))


def _gzipped(data: bytearray, rng: Random, seeds: Sequence[bytes]) -> bytearray:
    return _flip(bytearray(gzip.compress(bytes(data), 1, mtime=0)), rng, seeds)


_Mutator = Callable[[bytearray, Random, Sequence[bytes]], bytearray]
_MUTATORS: tuple[_Mutator, ...] = (
    _flip, _bit, _cut, _delete, _repeat, _splice, _token, _number, _varint, _nest, _swap_lines, _gzipped,
)  # fmt: skip


def damaged(seed: bytes, seeds: Sequence[bytes], rng: Random) -> bytes:
    """``seed`` with damage at one to six places; ``seeds`` are what parts may be taken from."""
    data = bytearray(seed)
    limit = max(MAX_BYTES, 2 * len(data))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if data:
            data = rng.choice(_MUTATORS)(data, rng, seeds)[:limit]
    return bytes(data)
