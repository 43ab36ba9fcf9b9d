"""SCALE-Sim 3 (PyPI ``scalesim``): cycles of a product on a systolic array, stalls included."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hespas.estimators.external.adapter import (
    CommandError,
    ExternalSimulator,
    MatrixProduct,
    Simulated,
    package_availability,
    run_command,
)
from hespas.estimators.interface import Availability
from hespas.estimators.systolic.cycles import array_of, parse_array, parse_dataflow
from hespas.files.processes import isolated_script
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = ["ScaleSim"]

# The package's own command writes traces of every cycle, gigabytes of them.
_DRIVER = """
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
    """SCALE-Sim. Options of :class:`ExternalSimulator`, and: ``array`` as ``128x128`` and ``dataflow``
    (``os``, ``ws``, ``is``; both empty: the device's), ``buffer_kb`` of each operand. The package needs NumPy
    1.26.
    """

    array: str = ""
    dataflow: str = ""
    buffer_kb: int = 1024

    simulator: ClassVar[str] = "scalesim"

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        ExternalSimulator.__post_init__(self)
        if self.array:
            parse_array(self.array)
        if self.dataflow:
            parse_dataflow(self.dataflow)
        if self.buffer_kb < 1:
            raise UsageError("scalesim: buffer_kb must be 1 or more")

    def available(self) -> Availability:
        """Probe if the package is installed."""
        install = (
            "pip install scalesim 'numpy<2' in an environment of its own, and name its Python: "
            "`estimator=scalesim:command=PYTHON`"
        )
        return package_availability("scalesim", self.command, install)

    def configured(self, device: Device) -> str:
        """Return the settings file."""
        array = array_of(device, self.array, self.dataflow)
        if array is None:
            hint = "`estimator=scalesim:array=128x128,dataflow=ws`"
            raise UsageError(f"scalesim: {device.name} states no systolic array", hint=hint)
        return _SETTINGS.format(
            rows=array.rows, columns=array.columns, dataflow=array.dataflow, buffer_kb=self.buffer_kb
        )

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Return the total cycles of the report."""
        config, topology, layout = (folder / name for name in ("run.cfg", "topology.csv", "layout.csv"))
        config.write_text(self.configured(device))
        # The last field of a row is dropped, so each ends with a comma. A layout is always read.
        topology.write_text(f"Layer,M,N,K,\nproduct,{product.m},{product.n},{product.k},\n")
        layout.write_text(f"Layer,\nproduct,{'1,' * _LAYOUT_COLUMNS}\n")
        out = folder / "out"
        out.mkdir()
        arguments = map(str, (config, topology, layout, out))
        command = isolated_script(_DRIVER, *arguments, python=self.command)
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
