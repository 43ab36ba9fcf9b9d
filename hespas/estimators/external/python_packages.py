"""External simulators that are Python packages: SCALE-Sim 3 and ZigZag 3.

SCALE-Sim (PyPI ``scalesim``) counts the cycles of a product on a systolic array, stalls included. ZigZag
(PyPI ``zigzag-dse``) counts the cycles of a product with the best mapping that it finds on an accelerator.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import msgspec

from hespas.estimators.external.adapter import (
    CommandError,
    ExternalSimulator,
    MatrixProduct,
    Simulated,
    package_availability,
    read_answer,
    run_command,
)
from hespas.estimators.interface import Availability
from hespas.estimators.systolic.cycles import array_of, parse_array, parse_dataflow
from hespas.files.limits import limits
from hespas.files.processes import isolated_script
from hespas.files.streams import read_document
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = ["ScaleSim", "ZigZag"]

# The package's own command writes traces of every cycle, gigabytes of them.
_SCALESIM_DRIVER = """
import sys
from scalesim.scale_sim import scalesim
config, topology, layout, out = sys.argv[1:]
run = scalesim(save_disk_space=True, verbose=False, config=config, topology=topology, layout=layout,
               input_type_gemm=True)
run.run_scale(top_path=out)
"""
_LAYOUT_COLUMNS = 30
_SETTINGS = """[general]
run_name = run
[architecture_presets]
ArrayHeight = {rows}
ArrayWidth = {columns}
IfmapSramSzkB = {buffer_kb}
FilterSramSzkB = {buffer_kb}
OfmapSramSzkB = {buffer_kb}
IfmapOffset = 0
FilterOffset = 1000000000
OfmapOffset = 2000000000
Dataflow = {dataflow}
Bandwidth = 10
ReadRequestBuffer = 32
WriteRequestBuffer = 32
[layout]
IfmapCustomLayout = False
IfmapSRAMBankBandwidth = 10
IfmapSRAMBankNum = 10
IfmapSRAMBankPort = 2
FilterCustomLayout = False
FilterSRAMBankBandwidth = 10
FilterSRAMBankNum = 10
FilterSRAMBankPort = 2
[sparsity]
SparsitySupport = false
SparseRep = ellpack_block
OptimizedMapping = false
BlockSize = 8
RandomNumberGeneratorSeed = 40
[run_presets]
InterfaceBandwidth = CALC
UseRamulatorTrace = False
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSim(ExternalSimulator):
    """Estimator that runs the simulator SCALE-Sim.

    It has the options of :class:`ExternalSimulator`, and: ``array`` (such as ``128x128``) and ``dataflow``
    (``os``, ``ws`` or ``is``); empty options are taken from the device. ``buffer_kb`` is the size of the
    buffer of each operand. The package needs NumPy 1.26.
    """

    array: str = ""
    dataflow: str = ""
    buffer_kb: int = 1024

    simulator: ClassVar[str] = "scalesim"
    what: ClassVar[str] = (
        "SCALE-Sim 3 (PyPI scalesim): cycles of a product on a systolic array, stalls included."
    )

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        ExternalSimulator.__post_init__(self)
        if self.array:
            parse_array(self.array)
        if self.dataflow:
            parse_dataflow(self.dataflow)
        if self.buffer_kb < 1:
            raise UsageError(f"scalesim: invalid option buffer_kb={self.buffer_kb}", hint="use 1 or more KiB")

    def available(self) -> Availability:
        """Return the availability: test if the package is installed."""
        install = (
            "pip install scalesim 'numpy<2' in an environment of its own, and name its Python: "
            "`estimator=scalesim:command=PYTHON`"
        )
        return package_availability("scalesim", self.command, install)

    def configured(self, device: Device) -> str:
        """Return SCALE-Sim's settings file as text."""
        array = array_of(device, self.array, self.dataflow)
        if array is None:
            hint = "state one: `estimator=scalesim:array=128x128,dataflow=ws`"
            raise UsageError(f"scalesim: the file of {device.name} states no systolic array", hint=hint)
        return _SETTINGS.format(
            rows=array.rows, columns=array.columns, dataflow=array.dataflow, buffer_kb=self.buffer_kb
        )

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Run SCALE-Sim for a product and return the total cycles of its report."""
        config, topology, layout = (folder / name for name in ("run.cfg", "topology.csv", "layout.csv"))
        config.write_text(self.configured(device))
        # The last field of a row is dropped, so each ends with a comma. A layout is always read.
        topology.write_text(f"Layer,M,N,K,\nproduct,{product.m},{product.n},{product.k},\n")
        layout.write_text(f"Layer,\nproduct,{'1,' * _LAYOUT_COLUMNS}\n")
        out = folder / "out"
        out.mkdir()
        arguments = map(str, (config, topology, layout, out))
        command = isolated_script(_SCALESIM_DRIVER, *arguments, python=self.command)
        output = run_command(command, folder, self.timeout_s)
        report = next(out.rglob("COMPUTE_REPORT.csv"), None)
        if report is None:
            raise CommandError(f"no COMPUTE_REPORT.csv was written: {output.strip()[-500:]}")
        with report.open(newline="") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
        try:
            last_cycle = float(rows[1][rows[0].index("Total Cycles")])
        except (IndexError, ValueError) as error:
            raise CommandError("COMPUTE_REPORT.csv states no total cycles") from error
        return Simulated(cycles=last_cycle + 1)  # the report counts from 0


_ZIGZAG_DRIVER = """
import json, sys
from zigzag.api import get_hardware_performance_zigzag
request = json.load(open(sys.argv[1]))
energy, latency, _ = get_hardware_performance_zigzag(
    workload=request["workload"], accelerator=request["accelerator"], mapping=request["mapping"],
    opt="latency", dump_folder=request["folder"], lpf_limit=request["lpf_limit"],
    loma_show_progress_bar=False)
json.dump({"cycles": float(latency), "energy": float(energy)}, open(sys.argv[2], "w"))
"""
_MOST_LOOPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigZag(ExternalSimulator):
    """Estimator that runs the mapper ZigZag.

    It has the options of :class:`ExternalSimulator`, and: ``accelerator`` and ``mapping``, ZigZag's own YAML
    files (both required). The spatial mapping must suit matmuls with dimensions ``D`` (m), ``K`` (n) and
    ``C`` (k). ``lpf_limit``: effort of the search; 8 takes minutes, 6 takes seconds.
    """

    accelerator: str = ""
    mapping: str = ""
    lpf_limit: int = 6

    simulator: ClassVar[str] = "zigzag"
    what: ClassVar[str] = (
        "ZigZag 3 (PyPI zigzag-dse): cycles of a product with the best mapping that it finds."
    )

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        ExternalSimulator.__post_init__(self)
        if not 1 <= self.lpf_limit <= _MOST_LOOPS:
            raise UsageError(
                f"zigzag: invalid option lpf_limit={self.lpf_limit}", hint=f"use 1 to {_MOST_LOOPS}"
            )

    def available(self) -> Availability:
        """Return the availability: test if the package is installed."""
        # The package does not declare that it needs six.
        install = (
            "pip install zigzag-dse six, or name a Python that has it: `estimator=zigzag:command=PYTHON`"
        )
        return package_availability("zigzag-dse", self.command, install)

    def configured(self, device: Device) -> str:
        """Return digests of the two YAML files and the search effort, for the cache key."""
        digests = [
            sha256(read_document(Path(path), limits().configuration_bytes, f"ZigZag's {role}")).hexdigest()
            for path, role in self._files()
        ]
        return " ".join((*digests, str(self.lpf_limit)))

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Run ZigZag for a product and return the cycles of the best mapping."""
        accelerator, mapping = (str(Path(path).resolve()) for path, _ in self._files())
        request, answer = folder / "request.json", folder / "answer.json"
        layer = {  # an operand whose source is the layer itself is an input
            "id": 0,
            "name": "product",
            "operator_type": "Gemm",
            "equation": "O[d][k]+=I[d][c]*W[c][k]",
            "loop_dims": ["D", "K", "C"],
            "loop_sizes": [product.m, product.n, product.k],
            "operand_precision": {
                "W": product.bits,
                "I": product.bits,
                "O": 2 * product.bits,
                "O_final": product.bits,
            },
            "operand_source": {"W": 0, "I": 0},
        }
        document = {
            "workload": [layer],
            "accelerator": accelerator,
            "mapping": mapping,
            "folder": str(folder / "out"),
            "lpf_limit": self.lpf_limit,
        }
        request.write_bytes(msgspec.json.encode(document))
        output = run_command(
            isolated_script(_ZIGZAG_DRIVER, str(request), str(answer), python=self.command),
            folder,
            self.timeout_s,
        )
        try:
            return msgspec.json.decode(read_answer(answer), type=Simulated)
        except (OSError, msgspec.DecodeError) as error:
            raise CommandError(f"zigzag wrote no result: {output.strip()[-500:]}") from error

    def _files(self) -> tuple[tuple[str, str], tuple[str, str]]:
        if not self.accelerator or not self.mapping:
            raise UsageError(
                "zigzag: no accelerator or no mapping is given",
                hint="name both: `estimator=zigzag:accelerator=FILE.yaml,mapping=FILE.yaml,clock_mhz=940`",
            )
        return (self.accelerator, "accelerator"), (self.mapping, "mapping")
