"""Adapter of external array simulators: installation probes, bounded runs, and saved results per product.

Simulators are programs that users build, found by path or by name, or Python packages in this Python or
another one. They run in processes of their own, in a temporary folder, with a time limit: they need other
versions of NumPy, use gigabytes and write files. A run simulates one product.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, version
from math import isfinite, isnan
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from hespas.estimators.interface import Availability, Prediction, estimate_by_operation
from hespas.estimators.result_cache import ResultCache, content_key
from hespas.estimators.systolic.lines import clock_hz
from hespas.files.processes import clean_environment, isolated_script, run, tied_to_parent
from hespas.files.trust import refuse_in_untrusted
from hespas.files.user_folders import cache_folder
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.progress import Progress
from hespas.hardware import Device
from hespas.operations import Operations, find_scheme

__all__ = [
    "CommandError",
    "ExternalSimulator",
    "MatrixProduct",
    "Simulated",
    "binary_availability",
    "binary_of",
    "package_availability",
    "products_of",
    "read_answer",
    "run_command",
]

_MOST_BYTES = 16 << 20
_MOST_WRITTEN_BYTES = 256 << 20
_REPORTED_CHARACTERS = 2000


class CommandError(Exception):
    """Error of an external program that did not start, failed, or ran out of time. The message includes the
    program's output.
    """


def run_command(
    command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program in ``folder`` and return its standard output and error (the last 16 MiB).

    Raises :class:`CommandError`, and ``UnsupportedError`` for untrusted inputs.
    """
    refuse_in_untrusted("the estimator runs a program")
    with TemporaryFile() as output:
        try:
            ended = run(
                tied_to_parent(command),
                time_s=timeout_s,
                environment=clean_environment(environment),
                folder=folder,
                output=output,
                with_errors=True,
                output_bytes=_MOST_WRITTEN_BYTES,
            )
        except OSError as error:
            raise CommandError(f"{command[0]} does not start: {error.strerror or error}") from error
        if ended.stopped == "time":
            raise CommandError(f"no result within {timeout_s:g} s")
        if ended.stopped == "output":
            raise CommandError(f"{command[0]} wrote more than {_MOST_WRITTEN_BYTES >> 20} MiB of messages")
        size = output.seek(0, os.SEEK_END)
        output.seek(max(size - _MOST_BYTES, 0))
        text = output.read().decode("utf-8", "replace")
    if ended.status:
        raise CommandError(
            f"exit status {ended.status}: {text.strip()[-_REPORTED_CHARACTERS:] or 'without a message'}"
        )
    return text


def read_answer(path: Path) -> bytes:
    """Return the contents of a program's output file, or empty bytes if the file is missing. Raises
    :class:`CommandError` for more than 16 MiB.
    """
    if not path.is_file():
        return b""
    if path.stat().st_size > _MOST_BYTES:
        raise CommandError(f"{path.name} is larger than {_MOST_BYTES >> 20} MiB")
    return path.read_bytes()


def binary_of(command: str, name: str) -> str | None:
    """Return the path of the program ``command``, or of a program called ``name``; None if it
    cannot be run.
    """
    program = shutil.which(command or name)
    return None if program is None else str(Path(program).resolve())


def binary_availability(command: str, name: str, install: str) -> Availability:
    """Return the availability of a program. Such programs report no version, so a digest of the file is the
    version.
    """
    program = binary_of(command, name)
    if program is None:
        return Availability(False, f"no program {command or name!r}", install)
    stat = Path(program).stat()
    return Availability(True, f"{program} ({_digest(program, stat.st_mtime_ns, stat.st_size)[:12]})")


@lru_cache(maxsize=8)
def _digest(path: str, changed_ns: int, size: int) -> str:
    """Return a digest of a program file. ``changed_ns`` and ``size`` only invalidate the cached result when
    the file changes.
    """
    with Path(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


_PROBE_S = 60.0
_PROBE = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


def package_availability(distribution: str, command: str, install: str) -> Availability:
    """Return the availability of a package for the Python interpreter ``command`` (empty: this
    interpreter).
    """
    if not command:
        try:
            return Availability(True, f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            return Availability(False, f"{distribution} is not installed", install)
    try:
        return Availability(True, f"{distribution} {_version_there(distribution, command)}")
    except CommandError as error:
        lines = str(error).strip().splitlines()
        return Availability(
            False, f"{distribution} with {command}: {lines[-1] if lines else 'fails'}", install
        )


@lru_cache(maxsize=8)
def _version_there(distribution: str, command: str) -> str:
    with TemporaryDirectory(prefix="hespas-probe-") as folder:
        return run_command(
            isolated_script(_PROBE, distribution, python=command), Path(folder), _PROBE_S
        ).strip()


class MatrixProduct(NamedTuple):
    """Sizes of a matmul (m x k) by (k x n) with operands of ``bits`` bits."""

    m: int
    n: int
    k: int
    bits: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} of {self.bits} bits"


def products_of(ops: Operations) -> list[tuple[MatrixProduct, int] | None]:
    """Return the matmul of each operation and the number of times it runs (the batch size); None for other
    operations.

    A convolution is converted to the matmul that im2col makes of it.
    """
    is_product = np.zeros(len(ops), np.bool_)
    is_product[ops.kind.where("matmul", "convolution")] = True
    sizes = [ops.dim(name).tolist() for name in ("m", "n", "k", "batch")]
    products: list[tuple[MatrixProduct, int] | None] = []
    for row in range(len(ops)):
        m, n, k, batch = (column[row] for column in sizes)
        scheme = find_scheme(ops.scheme[row])
        is_whole = all(size >= 1 and size.is_integer() for size in (m, n, k, batch))  # false for NaN
        if not is_product[row] or scheme is None or not is_whole:
            products.append(None)
            continue
        bits = int(max(scheme.activation_bits, 1))
        products.append((MatrixProduct(int(m), int(n), int(k), bits), int(batch)))
    return products


_LISTED = 5


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Result that a simulator reports for a product: cycles of its clock, or a time [ns]; -1 if it is not
    reported.
    """

    cycles: float = -1.0
    duration_ns: float = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalSimulator:
    """Base class of estimators that run an external simulator. Fields are their common options.

    ``command``: the program, or the Python with the package (empty: it is searched for). ``clock_mhz``: clock
    rate of the array (0: the device's clock rate). ``timeout_s``: time limit for one matmul. ``cache``:
    folder of saved results (empty: the user's cache). ``failed``: treat a matmul on which the simulator fails
    as an ``error``, or as ``unknown``. ``progress`` is called with the number of finished matmuls and of all
    matmuls.
    """

    command: str = ""
    clock_mhz: float = 0.0
    timeout_s: float = 600.0
    cache: str = ""
    failed: str = "error"
    progress: Progress | None = field(default=None, repr=False, compare=False)

    simulator: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.failed not in {"error", "unknown"}:
            raise UsageError(f"{self.name}: invalid option failed={self.failed}", hint="use error or unknown")
        if not (self.clock_mhz >= 0 and isfinite(self.clock_mhz)):
            raise UsageError(
                f"{self.name}: invalid option clock_mhz={self.clock_mhz:g}",
                hint="use a clock above 0, or 0 for the device's",
            )
        if not 0 < self.timeout_s < float("inf"):
            raise UsageError(
                f"{self.name}: invalid option timeout_s={self.timeout_s:g}", hint="use seconds above 0"
            )
        if self.progress is not None and not callable(self.progress):
            raise UsageError(
                f"{self.name}: option progress must be a Python function", hint="set it in Python only"
            )

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        return self.simulator

    def available(self) -> Availability:
        """Return if the simulator is installed, and its version."""
        raise NotImplementedError

    def configured(self, device: Device) -> str:
        """Return the settings that affect a result, apart from the sizes of the matmul, as text for the cache
        key. Raises ``UsageError`` if a setting is missing.
        """
        raise NotImplementedError

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Run the simulator for one product in the empty folder ``folder``, and return its result. Raises
        :class:`CommandError`.
        """
        raise NotImplementedError

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each product of a graph; NaN for other operations."""
        return estimate_by_operation(self, graph, device, diagnostics)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of each matmul; NaN for other operations.

        Raises ``UnsupportedError`` if the simulator is not installed, or fails (unless ``failed`` is
        ``unknown``), ``UsageError`` if an option is missing.
        """
        findings = Diagnostics() if diagnostics is None else diagnostics
        products = products_of(ops)
        uncovered = Counter(
            ops.op[row] or ops.kind[row] for row, product in enumerate(products) if product is None
        )
        if uncovered:
            listed = ", ".join(f"{op} ({count:,})" for op, count in uncovered.most_common(_LISTED))
            text = f"no duration: {self.name} simulates matmuls of known sizes only, not {listed}"
            findings.warning(f"{self.name}.not-a-product", "operations", text, count=uncovered.total())
        distinct = dict.fromkeys(product[0] for product in products if product is not None)
        time_ns = self._times_ns(list(distinct), device, findings)
        times = np.full(len(ops), np.nan)
        for row, product in enumerate(products):
            if product is not None:
                times[row] = time_ns[product[0]] * product[1]
        return Prediction.of(self.name, times, basis=f"simulator {self.name}")

    def clock_hz(self, device: Device) -> float:
        """Return the clock [Hz] by which cycles are converted to time. Raises ``UsageError`` if neither the
        options nor the device state one.
        """
        if self.clock_mhz:
            return self.clock_mhz * 1e6
        device_hz = clock_hz(device)
        if isnan(device_hz):
            hint = f"state it: `estimator={self.name}:clock_mhz=940`"
            raise UsageError(
                f"{self.name}: the file of {device.name} states no clock of a systolic array", hint=hint
            )
        return device_hz

    def _times_ns(
        self, products: list[MatrixProduct], device: Device, diagnostics: Diagnostics
    ) -> dict[MatrixProduct, float]:
        """Return the time of each product [ns]: saved results if there are any, else simulated ones. NaN if
        the simulator failed.
        """
        if not products:
            return {}
        availability = self.available()
        if not availability.is_available:
            raise UnsupportedError(
                f"estimator {self.name!r}: {availability.detail}", hint=availability.install
            )
        configured = self.configured(device)
        folder = Path(self.cache) if self.cache else cache_folder("simulated")
        cache = ResultCache(folder / self.name, Simulated)
        times: dict[MatrixProduct, float] = {}
        for done, product in enumerate(products):
            if self.progress:
                self.progress(done, len(products))
            key = content_key((self.name, availability.detail, configured, repr(tuple(product))))
            result = cache.get(key)
            if result is None or not _states_time(result):
                result = self._run(product, device, diagnostics)
                if result is not None:
                    cache.put(key, result)
            if result is None:
                times[product] = np.nan
            elif result.duration_ns > 0:
                times[product] = result.duration_ns
            else:
                times[product] = 1e9 * result.cycles / self.clock_hz(device)
        if self.progress:
            self.progress(len(products), len(products))
        return times

    def _run(self, product: MatrixProduct, device: Device, diagnostics: Diagnostics) -> Simulated | None:
        try:
            with TemporaryDirectory(prefix=f"hespas-{self.name}-") as folder:
                result = self.simulate(product, device, Path(folder))
            if not _states_time(result):
                raise CommandError("the output of the simulator states no time")
        except CommandError as error:
            text = f"{self.name} failed on a matmul of {product}: {error}"
            if self.failed == "error":
                hint = f"leave it unknown: `estimator={self.name}:failed=unknown` (or `on_unknown=warn`)"
                raise UnsupportedError(text, hint=hint) from error
            diagnostics.error(f"{self.name}.failed", str(product), text)
            return None
        return result


def _states_time(result: Simulated) -> bool:
    """Return True if a saved result has a time or a number of cycles. A damaged result has neither."""
    return 0 < max(result.cycles, result.duration_ns) < float("inf")
