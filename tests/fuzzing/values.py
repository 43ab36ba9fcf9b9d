"""Values that are unusual for readers: limits of number types, odd texts, odd bytes."""

from __future__ import annotations

from math import inf, nan

__all__ = ["BYTES", "FLOATS", "INTEGERS", "TEXTS", "Raw"]


class Raw(str):
    """Text that is written to a document without quotes."""

    __slots__ = ()


INTEGERS = (
    0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 65_535, 65_536, 1_000_000,
    2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1,
    2**64 - 1, 2**64, 10**30, 10**400,
)  # fmt: skip
FLOATS = (
    0.0, -0.0, 0.5, -1.0, 1.5, 1e-320, 1e-9, 1e15, 2.0**53, 1.8e19, 1e30, 1e300, 1e308, -1e308,
    nan, inf, -inf,
)  # fmt: skip
TEXTS = (
    "", " ", "0", "-1", "1e999", "NaN", "9223372036854775808", "null", "a" * 300, "x" * 20_000, "1" * 5_000,
    "ü", "数据", "\u202e", "\U0001f600", "\ud800", "\0", "\x1b[31m", "a\nb", "a\tb", "a\rb", "\x7f", "\u2028",
    "../../etc/passwd", "/dev/zero", "file:///x", "=1+1", "<script>alert(1)</script>", "&amp;", '"',
    "'", "\\", "%s%n", "{}", "[]", "()", "[1, 2]", "[[[[1]]]]", "true", "None", "GenericList[Tensor(float)]",
)  # fmt: skip
BYTES = (b"", b"\0", b"\xff" * 11, b"\x80" * 10, b"\xff\xfe", b"a" * 300, b"\x1f\x8b", b"\0" * 70)
