"""Keyed replacement of texts that only the holder of the key can reverse.

A token is the deterministic encryption of a text (a synthetic initialization vector, as in RFC 5297, made
with HMAC-SHA256): equal texts have equal tokens in all files and ranks, another key gives other tokens, and a
token that was changed, or made with another key, is not accepted.
"""

from __future__ import annotations

import hmac
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hespas.files.output import write_atomically
from hespas.graph.errors import FormatError, UsageError

__all__ = ["Key", "load_key"]

_VECTOR_BYTES = 8
_BLOCK_BYTES = 16
"""Texts are padded to multiples of this size, so that tokens do not show their exact lengths."""
_SHORTEST_KEY = 16
_LONGEST_KEY = 1 << 16
_HEX = re.compile(r"t(?:[0-9a-f]{2}){24,}")


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """Secret from which tokens and all random choices of an obfuscation follow."""

    secret: bytes

    def token(self, text: str) -> str:
        """Return the token of a text: ``t`` and hexadecimal digits. The empty text stays empty."""
        if not text:
            return ""
        plain = text.encode("utf-8", "surrogatepass") + b"\x80"
        plain += bytes(-len(plain) % _BLOCK_BYTES)
        vector = hmac.digest(self.secret, b"vector" + plain, "sha256")[:_VECTOR_BYTES]
        return "t" + (vector + self._masked(vector, plain)).hex()

    def text(self, token: str) -> str | None:
        """Return the text of a token, None if the token was not made with this key."""
        if not self.is_token(token):
            return None
        data = bytes.fromhex(token[1:])
        vector = data[:_VECTOR_BYTES]
        plain = self._masked(vector, data[_VECTOR_BYTES:])
        expected = hmac.digest(self.secret, b"vector" + plain, "sha256")[:_VECTOR_BYTES]
        if not hmac.compare_digest(vector, expected):
            return None
        return plain.rstrip(b"\0")[:-1].decode("utf-8", "surrogatepass")

    @staticmethod
    def is_token(text: str) -> bool:
        """Return True if a text has the form of a token of any key."""
        return _HEX.fullmatch(text) is not None

    def uniform(self, purpose: str) -> float:
        """Return a number in [0, 1) that the key and a purpose determine."""
        digest = hmac.digest(self.secret, b"uniform" + purpose.encode(), "sha256")
        return int.from_bytes(digest[:6], "little") / 2.0**48

    def _masked(self, vector: bytes, data: bytes) -> bytes:
        """Return the exclusive or of the data and the key stream of a vector."""
        blocks = -(-len(data) // 32)
        stream = b"".join(
            hmac.digest(self.secret, b"stream" + vector + block.to_bytes(4, "little"), "sha256")
            for block in range(blocks)
        )
        masked = int.from_bytes(data, "little") ^ int.from_bytes(stream[: len(data)], "little")
        return masked.to_bytes(len(data), "little")


def load_key(path: Path, *, create: bool) -> Key:
    """Return the key of a file: its bytes without surrounding white space.

    With ``create``, a missing file is written with 32 random bytes in hexadecimal digits, readable only by
    its owner. Raises ``UsageError`` for a missing file, ``FormatError`` for one that is too short or long, or
    that cannot be read.
    """
    if not path.exists():
        if not create:
            raise UsageError(
                f"key file {str(path)!r} does not exist",
                hint="name the file that `obfuscate` wrote",
            )

        made = Key(os.urandom(32).hex().encode("ascii"))

        def fill(temporary: Path) -> None:
            temporary.touch(mode=0o600)
            temporary.write_bytes(made.secret + b"\n")

        write_atomically(path, fill, overwrite=False, directory=False)
        return made
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or pipe"
        raise FormatError(f"{kind} is not a key", path=str(path), hint="name a file")
    try:
        with path.open("rb") as file:
            secret = file.read(_LONGEST_KEY + 1).strip()
    except OSError as error:
        message = f"the key cannot be read: {error.strerror}"
        raise FormatError(message, path=str(path), hint="name a file that you may read") from error
    if not _SHORTEST_KEY <= len(secret) <= _LONGEST_KEY:
        raise FormatError(
            f"the key has {len(secret)} bytes; {_SHORTEST_KEY} to {_LONGEST_KEY} are accepted",
            path=str(path),
            hint="name a file that does not exist yet: a random key is written to it",
        )
    return Key(secret)
