"""One rank of a real Gloo job, recorded as the reference of captures without other ranks.

python -m tests.captures.torch.gloo_rank PROGRAM MESH RANK PORT OUT
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from fixtures.make.torch_programs import PROGRAMS
from hespas.captures.torch.calls import CallArgument, RankRecording, RecordedCall, TensorRecord
from hespas.captures.torch.library import torch_module
from hespas.captures.torch.recorder import StepRecorder
from hespas.graph.mesh import Mesh

__all__ = ["call_lines", "communication_lines", "main"]


def call_lines(recording: RankRecording) -> list[str]:
    """Each dispatched operation with types, shapes and strides. Numbers with a fraction are left out: those
    of an optimizer depend on how many steps it made.
    """
    return [
        " ".join((call.op, call.overload, call.phase, *map(_argument, call.arguments)))
        for call in recording.calls
    ]


def communication_lines(recording: RankRecording) -> list[str]:
    """Each collective and message in order: kind, ranks of the group, bytes, peer, tag."""
    return [_communication(recording, call) for call in recording.calls if call.communication is not None]


def _communication(recording: RankRecording, call: RecordedCall) -> str:
    talk = call.communication
    if talk is None:
        return ""
    sizes = (talk.operand_bytes, talk.result_bytes, talk.peer, talk.tag)
    return f"{call.op} {recording.groups[talk.group]} {sizes} {talk.reduction} {talk.ragged}"


def _argument(value: CallArgument) -> str:
    if isinstance(value, TensorRecord):
        return f"{value.dtype}{value.shape}{value.strides}"
    if isinstance(value, str):
        return "number" if "." in value or "e-" in value else value
    return _several(value)


def _several(values: Iterable[TensorRecord]) -> str:
    return f"[{' '.join(_argument(each) for each in values)}]"


def main(program: str, mesh_text: str, rank: int, port: int, out: Path) -> None:
    """Record the third step of a rank, whose peers run beside it."""
    mesh = Mesh.of(mesh_text)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    distributed = torch_module("torch.distributed")
    torch_module().set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=mesh.num_devices)
    make_mesh = torch_module("torch.distributed.device_mesh").init_device_mesh
    step = PROGRAMS[program](make_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names))
    step()
    step()
    recorder = StepRecorder(rank, mesh.num_devices)
    with recorder.recording():
        step()
    lines = [*call_lines(recorder.record), "", *communication_lines(recorder.record)]
    out.write_text("\n".join(lines), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
