"""Functions as they are named in commands: ``MODULE:FUNCTION``, or ``FILE.py:FUNCTION``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType

from hespas.graph.errors import HespasError, MissingExtraError, UsageError

__all__ = ["load_function", "load_object", "users_code"]

_FORM = "MODULE:FUNCTION or FILE.py:FUNCTION, for example train:step"


def load_function(target: str) -> Callable[..., object]:
    """The function that ``target`` names. Runs its module, of the current folder too, as ``python -m``.

    Raises ``UsageError`` where there is none.
    """
    found = load_object(target)
    if not callable(found):
        raise UsageError(f"{target}: {type(found).__name__} is no function", hint=_FORM)
    return found


def load_object(target: str, beside: str = "") -> object:
    """What ``target`` names; a name alone is one of the module of ``beside``. Raises ``UsageError``."""
    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = beside.rpartition(":")[0], target
    if not place or not name:
        raise UsageError(f"{target!r} names no function", hint=_FORM)
    found: object = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {name!r}", hint=_FORM)
        found = getattr(found, part)
    return found


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _of_file(Path(place))
    here = str(Path.cwd())
    with users_code(f"importing {place}"):
        try:
            if here not in sys.path:
                sys.path.insert(0, here)
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(f"{error.name}.")):
                raise UsageError(f"there is no module {place!r}", hint=_FORM) from error
            raise


def _of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError("there is no such file", path=str(path), hint=_FORM)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.resolve()):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError("this is no module of Python", path=str(path), hint=_FORM)
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    with users_code(f"importing {path}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextmanager
def users_code(doing: str) -> Generator[None]:
    """Around code of the user: what it prints goes to standard error, what it raises is the user's to mend.

    Raises ``UsageError`` with the place in the user's file.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except HespasError:
        raise
    except ModuleNotFoundError as error:
        if error.name in _FRAMEWORKS:
            raise MissingExtraError(doing, error.name) from error
        raise UsageError(
            f"{doing} fails: there is no module {error.name!r}", position=_place(error)
        ) from error
    except SystemExit as error:
        raise UsageError(f"{doing} ends the process", hint=_GUARD) from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"{doing} fails: {type(error).__name__}: {reason}", position=_place(error)
        ) from error


_FRAMEWORKS = ("jax", "torch")
_GUARD = "what a script does when it is run belongs under: if __name__ == '__main__'"


def _place(error: BaseException) -> str | None:
    """The innermost line that is neither ours nor of an installed package."""
    trace, place = error.__traceback__, None
    ours = str(Path(__file__).parents[1])
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith((ours, "<", sys.base_prefix)):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
