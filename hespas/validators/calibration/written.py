"""A calibration as files: the learned models in a folder, then the hardware file that names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hespas.estimators.learned.serialization import forget_models, save_model
from hespas.files.output import check_destination, write_atomically
from hespas.graph.errors import OutputError
from hespas.hardware import write_device
from hespas.validators.calibration.calibrate import Calibration

__all__ = ["check_models_folder", "models_folder", "write_calibration"]


def models_folder(path: Path) -> Path:
    """Where the models that a hardware file names go: ``my-device.learned`` beside ``my-device.toml``."""
    return path.with_suffix(".learned")


def check_models_folder(path: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` where the models of the hardware file at ``path`` cannot be written."""
    folder = models_folder(path)
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            "exists and is no folder: the learned models go there",
            path=str(folder),
            hint="move it away, or name another --out",
        )
    check_destination(folder, overwrite=overwrite)


def write_calibration(done: Calibration, path: Path, *, overwrite: bool = False) -> Path:
    """Write the models, if there are any, then the hardware file: each at once or not at all. Raises
    ``OutputError`` where one exists (unless ``overwrite``) or cannot be written.

    Models of an earlier run that the new file does not name stay in the folder, and are asked by nobody.
    """
    device = replace(done.device, learned_models=())
    models = (*done.models, *done.kept_models)
    if models:
        check_models_folder(path, overwrite=overwrite)
        folder = models_folder(path)

        def fill(temporary: Path) -> None:
            for model in models:
                save_model(model, temporary)

        write_atomically(folder, fill, overwrite=overwrite, directory=True)
        forget_models()
        place = folder.resolve()
        names = [model.card.name for model in models]  # asked in this order
        device = replace(device, learned_models=tuple(str(place / f"{name}.json") for name in names))
    return write_device(device, path, overwrite=overwrite)
