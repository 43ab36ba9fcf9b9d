"""What all array simulators share: found or told what to install, run once per product, results kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, version
from math import isfinite, isnan
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from hespas.estimators.interface import Availability, Prediction, estimate_by_operation
from hespas.estimators.result_cache import ResultCache, cache_folder, content_key
from hespas.estimators.systolic.lines import clock_hz
from hespas.files.processes import clean_environment, isolated_script, tied_to_parent
from hespas.files.trust import refuse_in_untrusted
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import Device
from hespas.operations import Operations, find_scheme

__all__ = [
    "CommandError",
    "External",
    "Product",
    "Simulated",
    "binary_availability",
    "binary_of",
    "package_availability",
    "products_of",
    "read_answer",
    "run_command",
]

# Other people's programs, each in a folder of its own: bounded in time, ended with all they start.

_MOST_BYTES = 16 << 20
_MOST_WRITTEN_BYTES = 256 << 20
_ASKED_AGAIN_S = 0.2
_LAST_WORDS = 2000


class CommandError(Exception):
    """A program that could not be started, failed, or took too long; the message says which, in its words."""


def run_command(
    command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program in ``folder`` and return what it wrote, errors included (the last 16 MiB of it).

    Raises :class:`CommandError`, and ``UnsupportedError`` where inputs are untrusted.
    """
    refuse_in_untrusted("the estimator runs a program")
    with TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                tied_to_parent(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=clean_environment(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{command[0]} does not start: {error.strerror or error}") from error
        try:
            status = _status(process, output.fileno(), timeout_s)
        finally:
            _end(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(size - _MOST_BYTES, 0))
        text = output.read().decode("utf-8", "replace")
    if status:
        raise CommandError(f"exit status {status}: {text.strip()[-_LAST_WORDS:] or 'it says nothing'}")
    return text


def read_answer(path: Path) -> bytes:
    """What a program left in a file; nothing where it left none. Raises :class:`CommandError` for more than
    16 MiB.
    """
    if not path.is_file():
        return b""
    if path.stat().st_size > _MOST_BYTES:
        raise CommandError(f"{path.name} is larger than {_MOST_BYTES >> 20} MiB")
    return path.read_bytes()


def _status(process: subprocess.Popen[bytes], output: int, timeout_s: float) -> int:
    """The exit status, asked for again and again: who writes without end would fill the disk until then."""
    end_s = monotonic() + timeout_s
    while True:
        left_s = end_s - monotonic()
        try:
            return process.wait(min(_ASKED_AGAIN_S, max(left_s, 0.0)))
        except subprocess.TimeoutExpired:
            if left_s <= 0:
                raise CommandError(f"no result within {timeout_s:g} s") from None
        if os.fstat(output).st_size > _MOST_WRITTEN_BYTES:
            raise CommandError(f"it wrote more than {_MOST_WRITTEN_BYTES >> 20} MiB of messages")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The program and all it started, also where it ended by itself and left them behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Simulators that users build themselves: found by path, or by name where programs are looked for.


def binary_of(command: str, name: str) -> str | None:
    """The program: the one named, or one called ``name``; None where there is none that can be run."""
    found = shutil.which(command or name)
    return None if found is None else str(Path(found).resolve())


def binary_availability(command: str, name: str, install: str) -> Availability:
    """Whether the program is there. Such programs tell no version: their content stands for it."""
    found = binary_of(command, name)
    if found is None:
        return Availability(False, f"no program {command or name!r}", install)
    stat = Path(found).stat()
    return Availability(True, f"{found} ({_digest(found, stat.st_mtime_ns, stat.st_size)[:12]})")


@lru_cache(maxsize=8)
def _digest(path: str, changed_ns: int, size: int) -> str:
    """Of the content; time and size say when to look again."""
    with Path(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


# Simulators that are Python packages: looked for in this Python, or in the one that is named.
#
# They run in a process of their own: they want other versions of NumPy, take gigabytes, write files.

_PROBE_S = 60.0
_PROBE = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


def package_availability(distribution: str, command: str, install: str) -> Availability:
    """Whether a package is installed where ``command`` (empty: this Python) looks for it."""
    if not command:
        try:
            return Availability(True, f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            return Availability(False, f"{distribution} is not installed", install)
    try:
        return Availability(True, f"{distribution} {_version_there(distribution, command)}")
    except CommandError as error:
        said = str(error).strip().splitlines()
        return Availability(False, f"{distribution} with {command}: {said[-1] if said else 'fails'}", install)


@lru_cache(maxsize=8)
def _version_there(distribution: str, command: str) -> str:
    with TemporaryDirectory(prefix="hespas-probe-") as folder:
        return run_command(
            isolated_script(_PROBE, distribution, python=command), Path(folder), _PROBE_S
        ).strip()


# What array simulators understand: one product at a time.


class Product(NamedTuple):
    """(m x k) by (k x n), operands of ``bits`` bits."""

    m: int
    n: int
    k: int
    bits: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} of {self.bits} bits"


def products_of(ops: Operations) -> list[tuple[Product, int] | None]:
    """The product of each operation and how often it runs (its batch); None for what is no product.

    A convolution is the product that im2col makes of it.
    """
    wanted = np.zeros(len(ops), np.bool_)
    wanted[ops.kind.where("matmul", "convolution")] = True
    sizes = [ops.dim(name).tolist() for name in ("m", "n", "k", "batch")]
    found: list[tuple[Product, int] | None] = []
    for row in range(len(ops)):
        m, n, k, batch = (column[row] for column in sizes)
        scheme = find_scheme(ops.scheme[row])
        known = all(size >= 1 and size.is_integer() for size in (m, n, k, batch))  # NaN is neither
        if not wanted[row] or scheme is None or not known:
            found.append(None)
            continue
        bits = int(max(scheme.activation_bits, 1))
        found.append((Product(int(m), int(n), int(k), bits), int(batch)))
    return found


_LISTED = 5


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulator said of a product: cycles of its clock, or a time [ns]; -1 where it says none."""

    cycles: float = -1.0
    duration_ns: float = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """Fields are the options.

    ``command``: the program (or the Python that has the package; empty: looked for). ``clock_mhz``: of the
    array (0: the device's). ``timeout_s``: for one product. ``cache``: the folder of kept results (empty: the
    user's). ``failed``: what a product is that the simulator fails on: ``error`` or ``unknown``.
    ``progress`` is told how many products of how many are done.
    """

    command: str = ""
    clock_mhz: float = 0.0
    timeout_s: float = 600.0
    cache: str = ""
    failed: str = "error"
    progress: Callable[[int, int], None] | None = field(default=None, repr=False, compare=False)

    simulator: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.failed not in {"error", "unknown"}:
            raise UsageError(f"{self.name}: failed is {self.failed!r}", hint="error or unknown")
        if not (self.clock_mhz >= 0 and isfinite(self.clock_mhz) and 0 < self.timeout_s < float("inf")):
            raise UsageError(f"{self.name}: clock_mhz must not be negative, timeout_s must be above 0")
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"{self.name}: progress is a function", hint="it is given in Python only")

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return self.simulator

    def available(self) -> Availability:
        """Whether the simulator is there, and which version."""
        raise NotImplementedError

    def configured(self, device: Device) -> str:
        """All else that decides a result, as text. Raises ``UsageError`` where something lacks."""
        raise NotImplementedError

    def simulate(self, product: Product, device: Device, folder: Path) -> Simulated:
        """Run the simulator in an empty folder. Raises :class:`CommandError`."""
        raise NotImplementedError

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each product of a graph; nothing of other operations."""
        return estimate_by_operation(self, graph, device, diagnostics)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of each product; NaN of other operations.

        Raises ``UnsupportedError`` where the simulator is not there, or fails (unless ``failed`` is
        ``unknown``), ``UsageError`` where an option lacks.
        """
        found = Diagnostics() if diagnostics is None else diagnostics
        asked = products_of(ops)
        _tell_uncovered(self.name, ops, asked, found)
        distinct = dict.fromkeys(each[0] for each in asked if each is not None)
        said = self._said(list(distinct), device, found)
        times = np.full(len(ops), np.nan)
        for row, each in enumerate(asked):
            if each is not None:
                times[row] = said[each[0]] * each[1]
        return Prediction.of(self.name, times)

    def clock_hz(self, device: Device) -> float:
        """The clock that cycles are of. Raises ``UsageError`` where neither option nor device state one."""
        if self.clock_mhz:
            return self.clock_mhz * 1e6
        stated = clock_hz(device)
        if isnan(stated):
            hint = f"`estimator={self.name}:clock_mhz=940`"
            raise UsageError(f"{self.name}: {device.name} states no clock of an array", hint=hint)
        return stated

    def _said(
        self, products: list[Product], device: Device, diagnostics: Diagnostics
    ) -> dict[Product, float]:
        """The time of each product [ns], what is kept first; NaN where the simulator failed."""
        if not products:
            return {}
        there = self.available()
        if not there.is_available:
            raise UnsupportedError(f"estimator {self.name!r}: {there.detail}", hint=there.install)
        configured = self.configured(device)
        folder = Path(self.cache) if self.cache else cache_folder("simulated")
        cache = ResultCache(folder / self.name, Simulated)
        said: dict[Product, float] = {}
        for done, product in enumerate(products):
            if self.progress:
                self.progress(done, len(products))
            key = content_key((self.name, there.detail, configured, repr(tuple(product))))
            result = cache.get(key)
            if result is None or not _states_time(result):
                result = self._run(product, device, diagnostics)
                if result is not None:
                    cache.put(key, result)
            said[product] = self._time_ns(result, device)
        if self.progress:
            self.progress(len(products), len(products))
        return said

    def _run(self, product: Product, device: Device, diagnostics: Diagnostics) -> Simulated | None:
        try:
            with TemporaryDirectory(prefix=f"hespas-{self.name}-") as folder:
                result = self.simulate(product, device, Path(folder))
            if not _states_time(result):
                raise CommandError("its output states no time")
        except CommandError as error:
            text = f"{self.name} failed on a product of {product}: {error}"
            if self.failed == "error":
                hint = f"`estimator={self.name}:failed=unknown` (or `on_unknown=warn`) leaves it unknown"
                raise UnsupportedError(text, hint=hint) from error
            diagnostics.error(f"{self.name}.failed", str(product), text)
            return None
        return result

    def _time_ns(self, result: Simulated | None, device: Device) -> float:
        if result is None:
            return np.nan
        return result.duration_ns if result.duration_ns > 0 else 1e9 * result.cycles / self.clock_hz(device)


def _states_time(result: Simulated) -> bool:
    """Whether it says a time, or cycles; a kept result may be damaged."""
    return 0 < max(result.cycles, result.duration_ns) < float("inf")


def _tell_uncovered(
    name: str, ops: Operations, asked: list[tuple[Product, int] | None], diagnostics: Diagnostics
) -> None:
    uncovered = Counter(ops.op[row] or ops.kind[row] for row, each in enumerate(asked) if each is None)
    if uncovered:
        listed = ", ".join(f"{op} ({count:,})" for op, count in uncovered.most_common(_LISTED))
        text = f"no duration: {name} simulates products of known sizes only, not {listed}"
        diagnostics.warning(f"{name}.not-a-product", "operations", text, count=uncovered.total())
