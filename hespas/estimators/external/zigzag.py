"""ZigZag 3 (PyPI ``zigzag-dse``): cycles of a product with the best mapping it finds on an accelerator."""

from __future__ import annotations

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
from hespas.files.limits import limits
from hespas.files.processes import isolated_script
from hespas.files.streams import read_document
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = ["ZigZag"]

_DRIVER = """
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
    """ZigZag. Options of :class:`ExternalSimulator`, and: ``accelerator`` and ``mapping``, ZigZag's own YAML
    files (required: the spatial mapping must suit products, dimensions ``D`` (m), ``K`` (n) and ``C`` (k));
    ``lpf_limit``: effort of the search (8 takes minutes where 6 takes seconds).
    """

    accelerator: str = ""
    mapping: str = ""
    lpf_limit: int = 6

    simulator: ClassVar[str] = "zigzag"

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        ExternalSimulator.__post_init__(self)
        if not 1 <= self.lpf_limit <= _MOST_LOOPS:
            raise UsageError(f"zigzag: lpf_limit is 1 to {_MOST_LOOPS}")

    def available(self) -> Availability:
        """Probe if the package is installed."""
        # The package does not declare that it needs six.
        install = (
            "pip install zigzag-dse six, or name a Python that has it: `estimator=zigzag:command=PYTHON`"
        )
        return package_availability("zigzag-dse", self.command, install)

    def configured(self, device: Device) -> str:
        """Return digests of both files, and the effort."""
        digests = [
            sha256(read_document(Path(path), limits().configuration_bytes, f"ZigZag's {role}")).hexdigest()
            for path, role in self._files()
        ]
        return " ".join((*digests, str(self.lpf_limit)))

    def simulate(self, product: MatrixProduct, device: Device, folder: Path) -> Simulated:
        """Return the cycles of the best mapping."""
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
            isolated_script(_DRIVER, str(request), str(answer), python=self.command), folder, self.timeout_s
        )
        try:
            return msgspec.json.decode(read_answer(answer), type=Simulated)
        except (OSError, msgspec.DecodeError) as error:
            raise CommandError(f"no answer was written: {output.strip()[-500:]}") from error

    def _files(self) -> tuple[tuple[str, str], tuple[str, str]]:
        if not self.accelerator or not self.mapping:
            raise UsageError(
                "zigzag: an accelerator and a mapping are needed",
                hint="`estimator=zigzag:accelerator=FILE.yaml,mapping=FILE.yaml,clock_mhz=940`",
            )
        return (self.accelerator, "accelerator"), (self.mapping, "mapping")
