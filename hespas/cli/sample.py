"""``hespas sample``: list the sample files, or write them to a folder."""

from __future__ import annotations

from hespas.api.samples import sample as write_samples
from hespas.cli.command import Call, command
from hespas.cli.terminal import emit

__all__ = ["sample"]


@command(write_samples, without=("max_input_bytes",))
def sample(call: Call) -> None:
    """Write small input files of every kind to a folder; without names, list them.

    hespas sample

    hespas sample all
    """
    done = call.run(write_samples)
    call.write_json(done.to_json())
    if done.written:
        emit(done.headline())
        emit(f"  try: {done.samples[0].command_in(done.written)}")
    else:
        emit(
            done.table()
            .select({"name": "sample", "files": "files", "size_bytes": "size", "description": "description"})
            .to_text()
        )
        emit(("", "Write them with: hespas sample all"))
