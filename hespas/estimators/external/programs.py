"""External simulators that users build (C++): COCOSSim and ONNXim.

COCOSSim reports the time of a product on a square systolic array with its memory. ONNXim counts the cycles of
a product on the accelerator of one of its configurations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from hespas.estimators.external.adapter import (
    CommandError,
    ExternalSimulator,
    MatrixProduct,
    Simulated,
    binary_availability,
    binary_of,
    read_answer,
    run_command,
)
from hespas.estimators.interface import Availability
from hespas.estimators.systolic.cycles import array_of, parse_array, parse_dataflow
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.files.wire import field_bytes
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = ["Cocossim", "Onnxim", "matmul_model"]

_COCOSSIM_PROGRAM = "perf_model"
_COCOSSIM_TIME = re.compile(r"\bTime:\s*([0-9.eE+-]+)\s*us\b")
_COCOSSIM_CYCLES = re.compile(r"^\s*Cycles:?\s+([0-9.eE+]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cocossim(ExternalSimulator):
    """Estimator that runs the simulator COCOSSim.

    It has the options of :class:`ExternalSimulator`, and: ``array``, square, such as ``128x128`` (empty: the
    device's array), ``dataflow`` (``os`` or ``ws``), and ``cores``.
    """

    array: str = ""
    dataflow: str = ""
    cores: int = 1

    simulator: ClassVar[str] = "cocossim"
    what: ClassVar[str] = "COCOSSim (C++, built by the user): time of a product on a square systolic array."

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        ExternalSimulator.__post_init__(self)
        if self.array:
            parse_array(self.array)
        if self.dataflow and parse_dataflow(self.dataflow) == "is":
            raise UsageError(
                f"cocossim: dataflow {self.dataflow!r} is not available",
                hint="use dataflow=os or dataflow=ws",
            )
        if self.cores < 1:
            raise UsageError(f"cocossim: invalid option cores={self.cores}", hint="use 1 or more")

    def available(self) -> Availability:
        """Return the availability: test if the program exists."""
        install = "build COCOSSim and name its program: `estimator=cocossim:command=PATH/perf_model`"
        return binary_availability(self.command, _COCOSSIM_PROGRAM, install)

    def configured(self, device: Device) -> str:
        """Return the command line options of the program as text, for the cache key."""
        return " ".join(self._options(device))

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Run COCOSSim for a product and return its time, or its cycles if it reports no time."""
        layers, results = folder / "layers.txt", folder / "results.txt"
        # It accepts products with m <= n: the transposed product is the same work.
        m, n = sorted((product.m, product.n))
        layers.write_text(f"Matmul {m} {product.k} {n}\n")
        program = binary_of(self.command, _COCOSSIM_PROGRAM)
        if program is None:
            raise CommandError("the program no longer exists")
        command = [program, *self._options(device), "-i", str(layers), "-o", str(results)]
        text = run_command(command, folder, self.timeout_s)
        text += "\n" + read_answer(results).decode("utf-8", "replace")
        time, cycles = _last(_COCOSSIM_TIME, text), _last(_COCOSSIM_CYCLES, text)
        return Simulated(duration_ns=1e3 * time if time > 0 else -1.0, cycles=cycles)

    def _options(self, device: Device) -> list[str]:
        array = array_of(device, self.array, self.dataflow)
        if array is None:
            hint = "state one: `estimator=cocossim:array=128x128`"
            raise UsageError(f"cocossim: the file of {device.name} states no systolic array", hint=hint)
        if array.rows != array.columns:
            raise UsageError(
                f"cocossim: the array is {array.rows}x{array.columns}, but COCOSSim requires a square array",
                hint=f"set a square array: array={array.rows}x{array.rows}",
            )
        weights_stay = array.dataflow != "os"  # its arrays have no input-stationary dataflow
        settings = {"c": self.cores, "sa_sz": array.rows, "vu_sz": array.rows, "ws": int(weights_stay)}
        clock = f"{self.clock_hz(device) / 1e9:.6g}"
        return [*(text for name, value in settings.items() for text in (f"-{name}", str(value))), "-f", clock]


def _last(pattern: re.Pattern[str], text: str) -> float:
    """Return the last number in ``text`` that ``pattern`` matches, -1 without one."""
    numbers: list[str] = pattern.findall(text)
    try:
        return float(numbers[-1]) if numbers else -1.0
    except ValueError:
        return -1.0


_ONNXIM_PROGRAM = "Simulator"
_MODEL_NAME = "product"
_ONNXIM_CYCLES = re.compile(r"Total compute time:?\s+([0-9]+)")


class _OnnximConfig(msgspec.Struct):
    """Fields of an ONNXim configuration that Hespas reads; ``core_freq`` is in MHz."""

    core_freq: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Onnxim(ExternalSimulator):
    """Estimator that runs the simulator ONNXim.

    It has the options of :class:`ExternalSimulator`, and ``config``: the JSON configuration of ONNXim
    (required; it also states the clock rate).
    """

    config: str = ""

    simulator: ClassVar[str] = "onnxim"
    what: ClassVar[str] = "ONNXim (C++, built by the user): cycles of a product on a configured accelerator."

    def available(self) -> Availability:
        """Return the availability: test if the program exists."""
        install = (
            "build ONNXim and name its program: `estimator=onnxim:command=PATH/Simulator,config=FILE.json`"
        )
        return binary_availability(self.command, _ONNXIM_PROGRAM, install)

    def configured(self, device: Device) -> str:
        """Return the clock [Hz] of the option ``clock_mhz``, else of the configuration."""
        return self._config().decode("utf-8", "replace")

    def clock_hz(self, device: Device) -> float:
        """Return the clock [Hz] of the option ``clock_mhz``, or else of the configuration."""
        if self.clock_mhz:
            return self.clock_mhz * 1e6
        try:
            frequency_mhz = msgspec.json.decode(self._config(), type=_OnnximConfig).core_freq
        except msgspec.DecodeError as error:
            raise UsageError(f"onnxim: invalid configuration: {error}", path=self.config) from error
        if frequency_mhz <= 0:
            raise UsageError(
                "onnxim: the configuration has no core_freq", path=self.config, hint="add clock_mhz="
            )
        return frequency_mhz * 1e6

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Run ONNXim on a model with a single matrix product and return the cycles of that layer."""
        model = folder / "models" / _MODEL_NAME
        model.mkdir(parents=True)
        (model / f"{_MODEL_NAME}.onnx").write_bytes(matmul_model(product.m, product.n, product.k))
        models = folder / "models_list.json"
        models.write_bytes(msgspec.json.encode({"models": [{"name": _MODEL_NAME, "request_time": 0}]}))
        program = binary_of(self.command, _ONNXIM_PROGRAM)
        if program is None:
            raise CommandError("the program no longer exists")
        # Its home has the configurations of memories and networks in the folder of the named one.
        (folder / "configs").symlink_to(Path(self.config).resolve().parent, target_is_directory=True)
        command = [program, "--config", str(Path(self.config).resolve()), "--models_list", str(models)]
        text = run_command(command, folder, self.timeout_s, {"ONNXIM_HOME": str(folder)})
        cycles: list[str] = _ONNXIM_CYCLES.findall(text)
        return Simulated(cycles=sum(map(float, cycles)) if cycles else -1.0)

    def _config(self) -> bytes:
        if not self.config:
            hint = "name it: `estimator=onnxim:command=PATH/Simulator,config=FILE.json`"
            raise UsageError("onnxim: no configuration is given", hint=hint)
        return read_document(Path(self.config), limits().configuration_bytes, "a configuration of ONNXim")


_IR_VERSION, _OPSET = 8, 13
_FLOAT = 1


def matmul_model(m: int, n: int, k: int) -> bytes:
    """Return an ONNX model of the matmul ``y = x w``, with an input x of shape (m, k) and a weight w of shape
    (k, n). The weight has no values, because only its shape determines the time.

    The model is about forty bytes of protobuf. Field numbers are from the ONNX specification (``onnx.proto``,
    IR version 8).
    """
    node = _text(1, "x") + _text(1, "w") + _text(2, "y") + _text(3, "product") + _text(4, "MatMul")
    weight = b"".join(field_bytes(1, extent) for extent in (k, n)) + field_bytes(2, _FLOAT) + _text(8, "w")
    graph = (
        field_bytes(1, node)
        + _text(2, "product")
        + field_bytes(5, weight)
        + field_bytes(11, _tensor("x", (m, k)))
        + field_bytes(12, _tensor("y", (m, n)))
    )
    opset = _text(1, "") + field_bytes(2, _OPSET)
    return field_bytes(1, _IR_VERSION) + field_bytes(7, graph) + field_bytes(8, opset)


def _tensor(name: str, shape: Sequence[int]) -> bytes:
    extents = b"".join(field_bytes(1, field_bytes(1, extent)) for extent in shape)
    return _text(1, name) + field_bytes(2, field_bytes(1, field_bytes(1, _FLOAT) + field_bytes(2, extents)))


def _text(number: int, text: str) -> bytes:
    return field_bytes(number, text.encode())
