"""Bandwidth and latency of a loopback: ``python -m tools.loopback`` sends over TCP between two processes.

The figures in ``hespas/hardware/systems/loopback.toml`` are from this command, on the machine that the file
names: bytes per second in one direction, and half of the round-trip time of one byte.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context

__all__ = ["main", "measured"]

_BLOCK = 1 << 20
_TRIPS = 2000


def _answer(port: int, size: int) -> None:
    """Receive ``size`` bytes and confirm them, then return single bytes. This runs in the second process."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer, left = bytearray(_BLOCK), size
        while left:
            left -= line.recv_into(buffer, min(left, _BLOCK))
        line.sendall(b"k")
        for _ in range(_TRIPS):
            line.sendall(line.recv(1))


def measured(size: int) -> tuple[float, float]:
    """Return bytes per second in one direction and the latency of one byte [ns], the best of three runs."""
    runs = [_measured(size) for _ in range(3)]
    return max(rate for rate, _ in runs), min(latency for _, latency in runs)


def _measured(size: int) -> tuple[float, float]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = get_context("spawn").Process(target=_answer, args=(server.getsockname()[1], size))
        other.start()
        line, _ = server.accept()
        with line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            block = bytes(_BLOCK)
            begun = time.perf_counter()
            for _ in range(size // _BLOCK):
                line.sendall(block)
            line.recv(1)
            rate = size // _BLOCK * _BLOCK / (time.perf_counter() - begun)
            begun = time.perf_counter()
            for _ in range(_TRIPS):
                line.sendall(b"p")
                line.recv(1)
            latency_ns = (time.perf_counter() - begun) / _TRIPS / 2 * 1e9
        other.join()
    return rate, latency_ns


def main(words: Sequence[str] | None = None) -> int:
    """Print bandwidth and latency."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--mib", type=int, default=1024, help="amount of data to send [MiB]")
    rate, latency_ns = measured(parser.parse_args(words).mib << 20)
    sys.stdout.write(f"bandwidth_bytes_per_s = {rate:.3g}, latency_ns = {latency_ns:.3g}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
