"""Cost of the conversion of a StableHLO program to Chakra traces, against parsing it with jaxlib's bindings.

``python -m benchmarks.convert_speed [PROGRAM]``; the default is ResNet-50 training if the sample workloads
are in ``../shared``, else a fixture. Prints CPU seconds (user and system), peak memory and the ratio of user
CPU seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.process import alternate

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_RESNET = _ROOT.parent / "shared" / "data" / "workloads" / "resnet_50_train_step_4_devices_1024_batch.mlir.gz"
_DEFAULT = (
    _RESNET if _RESNET.exists() else _ROOT / "fixtures" / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"
)

_FLOOR = """
import gzip, sys
from pathlib import Path
import jaxlib.mlir.ir as ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo
data = Path(sys.argv[1]).read_bytes()
if data[:2] == b"\\x1f\\x8b":
    data = gzip.decompress(data)
registry = ir.DialectRegistry()
_jax_mlir_ext.register_dialects(registry)
context = ir.Context()
context.append_dialect_registry(registry)
context.load_all_available_dialects()
mhlo.register_mhlo_dialect(context)
for dialect in (chlo, sdy, stablehlo, mpmd):
    dialect.register_dialect(context)
ir.Module.parse(data, context)
"""


def main() -> None:
    """Measure and print the conversion and the floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "program", nargs="?", type=Path, default=_DEFAULT, help="StableHLO (default: %(default)s)"
    )
    program: Path = parser.parse_args().program
    convert = str(Path(sys.executable).with_name("hespas-convert"))
    with tempfile.TemporaryDirectory() as scratch:
        command = [convert, str(program), f"{scratch}/out", "--hardware", "H100-SXM", "--overwrite"]
        ours, floor, ratio = alternate(command, [sys.executable, "-c", _FLOOR, str(program)])
    print(f"{program.name}: conversion to Chakra traces, against loading jaxlib's bindings and parsing")
    print(f"  convert  {ours.user_s:6.2f} s user  {ours.system_s:5.2f} s system  {ours.peak_mb:6.0f} MB peak")
    print(
        f"  floor    {floor.user_s:6.2f} s user  {floor.system_s:5.2f} s system  {floor.peak_mb:6.0f} MB peak"
    )
    print(f"  user CPU ratio {ratio:.2f} (median of the pairs)")


if __name__ == "__main__":
    main()
