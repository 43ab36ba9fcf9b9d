"""Functions as they are named in commands: ``MODULE:FUNCTION``, or ``FILE.py:FUNCTION``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TextIO, cast

from hespas.files.trust import refuse_in_untrusted
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
    refuse_in_untrusted(f"{target!r} names a module of yours, which runs")
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
    with users_code(f"importing {place}"), _of_folder(Path.cwd()):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(f"{error.name}.")):
                raise UsageError(f"there is no module {place!r}", hint=_FORM) from error
            raise


def _of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError("there is no such file", path=str(path), hint=_FORM)
    file = path.resolve()
    with users_code(f"importing {path}"), _of_folder(file.parent):
        name = file.stem
        if name in sys.stdlib_module_names or _file_of(name) not in {"", str(file)}:
            name = f"{name}_of_{file.parent.name}"  # who imports the other one goes on to need it
        if _file_of(name) == str(file):
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError("this is no module of Python", path=str(path), hint=_FORM)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


@contextmanager
def _of_folder(folder: Path) -> Generator[None]:
    """Within, imports find modules of this folder first. What was loaded here from another folder is
    forgotten: a program finds its own modules, also where those of the last one had their names.
    """
    for name, module in list(sys.modules.items()):
        if vars(module).get(_LOADED_FROM, folder) != folder:
            del sys.modules[name]
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            file = _file_of(name)
            if _is_users(file) and Path(file).is_relative_to(folder):
                vars(sys.modules[name])[_LOADED_FROM] = folder


_LOADED_FROM = "__hespas_folder__"


def _file_of(name: str) -> str:
    """The file of a module that is loaded, empty where it is not or has none."""
    return str(getattr(sys.modules.get(name), "__file__", None) or "")


def _is_users(file: str) -> bool:
    """Whether a file is neither ours nor of an installed package."""
    ours = str(Path(__file__).parents[1])
    return bool(file) and "site-packages" not in file and not file.startswith((ours, "<", sys.base_prefix))


@contextmanager
def users_code(doing: str, remedies: Mapping[str, str] | None = None) -> Generator[None]:
    """Around code of the user: what it prints goes to standard error, what it raises is the user's to mend.
    ``remedies`` say what to do about errors by words that they have.

    Raises ``UsageError`` with the place in the user's file.
    """
    try:
        with _aside():
            yield
    except (HespasError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if error.name in _FRAMEWORKS:
            raise MissingExtraError(doing, error.name) from error
        raise UsageError(
            f"{doing} fails: there is no module {error.name!r}", position=_place(error)
        ) from error
    except SystemExit as error:
        raise UsageError(f"{doing} ends the process", hint=_GUARD) from error
    except BaseException as error:  # classes of their own, too: no error of users is one of ours
        reason = _reason(error)
        told = ": ".join(filter(None, (type(error).__name__, reason)))
        hint = next((hint for words, hint in (remedies or {}).items() if words in reason), None)
        raise UsageError(f"{doing} fails: {told}", position=_place(error), hint=hint) from error


class _Aside:
    """What stood as standard output before the first of the threads that run code of users, and how many do:
    the last one puts it back.
    """

    lock = Lock()
    running = 0
    before: TextIO | None = None


@contextmanager
def _aside() -> Generator[None]:
    """Standard output is standard error within, in all threads: it is one for the process."""
    with _Aside.lock:
        if not _Aside.running:
            _Aside.before, sys.stdout = sys.stdout, sys.stderr
        _Aside.running += 1
    try:
        yield
    finally:
        with _Aside.lock:
            _Aside.running -= 1
            if not _Aside.running:
                sys.stdout, _Aside.before = cast("TextIO", _Aside.before), None


def _reason(error: BaseException) -> str:
    """The first line of what an error says, which is code of the user too."""
    try:
        return next(iter(str(error).strip().splitlines()), "")
    except Exception:
        return "it cannot be told why: its own text fails"


_FRAMEWORKS = ("jax", "torch")
_GUARD = "what a script does when it is run belongs under: if __name__ == '__main__'"


def _place(error: BaseException) -> str | None:
    """The innermost line of the user's."""
    trace, place = error.__traceback__, None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_users(file):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
