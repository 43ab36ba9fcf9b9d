"""Import and execution of user functions, given as ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``."""

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

__all__ = ["load_function", "load_object", "user_code"]

_FORM = "name MODULE:FUNCTION or FILE.py:FUNCTION, for example train:step"
_LOADED_FROM = "__hespas_folder__"
"""Attribute of user modules: the folder from which they were imported."""
_FRAMEWORKS = ("jax", "torch")
_GUARD = "put code that only a script needs under: if __name__ == '__main__'"


def load_function(target: str) -> Callable[..., object]:
    """Return the function that ``target`` (``module:function``) names. This executes the module, with the
    current folder on the import path as with ``python -m``.

    Raises ``UsageError`` if the function does not exist.
    """
    function = load_object(target)
    if not callable(function):
        raise UsageError(f"{target}: {type(function).__name__} is not a function", hint=_FORM)
    return function


def load_object(target: str, relative_to: str = "") -> object:
    """Return the object that ``target`` (``module:name``) names. A name without a module is looked up in the
    module of ``relative_to``.

    Raises ``UsageError`` if the object does not exist.
    """
    refuse_in_untrusted(f"{target!r} names a module of yours, which would be executed")
    module_name, colon, name = target.rpartition(":")
    if not colon:
        module_name, name = relative_to.rpartition(":")[0], target
    if not module_name or not name:
        raise UsageError(f"{target!r} does not name a function", hint=_FORM)
    if module_name.endswith(".py"):
        value: object = _import_file(Path(module_name))
    else:
        with user_code(f"importing {module_name}"), _first_on_path(Path.cwd()):
            try:
                value = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                    raise UsageError(f"module {module_name!r} does not exist", hint=_FORM) from error
                raise
    for attribute in name.split("."):
        if not hasattr(value, attribute):
            raise UsageError(f"{module_name} has no {name!r}", hint=_FORM)
        value = getattr(value, attribute)
    return value


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError("the file does not exist", path=str(path), hint=_FORM)
    file = path.resolve()
    with user_code(f"importing {path}"), _first_on_path(file.parent):
        name = file.stem
        if name in sys.stdlib_module_names or _file_of(name) not in {"", str(file)}:
            name = f"{name}_of_{file.parent.name}"  # importers of the other module of this name still need it
        if _file_of(name) == str(file):
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UsageError("this is not a Python module", path=str(path), hint=_FORM)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


@contextmanager
def _first_on_path(folder: Path) -> Generator[None]:
    """Put ``folder`` first on the import path inside the block, and unload user modules that were loaded from
    another folder.

    A program thus imports its own modules even if the previous program had modules of the same names.
    """
    for name, module in sys.modules.copy().items():
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
            if _is_user_file(file) and Path(file).is_relative_to(folder):
                vars(sys.modules[name])[_LOADED_FROM] = folder


def _file_of(name: str) -> str:
    """Return the file of a loaded module; empty if it is not loaded or has no file."""
    return str(getattr(sys.modules.get(name), "__file__", None) or "")


def _is_user_file(file: str) -> bool:
    """Return True if a file belongs neither to Hespas nor to an installed package."""
    own = str(Path(__file__).parents[1])
    return bool(file) and "site-packages" not in file and not file.startswith((own, "<", sys.base_prefix))


@contextmanager
def user_code(action: str, remedies: Mapping[str, str] | None = None) -> Generator[None]:
    """Run user code inside the block. Its output is redirected to standard error, and its exceptions are
    reported as errors of the user.

    ``action`` starts the message (``tracing step``). ``remedies`` maps words of a message to a hint.

    Raises ``UsageError`` with the line of the user's file.
    """
    try:
        with _stdout_to_stderr():
            yield
    except (HespasError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if error.name in _FRAMEWORKS:
            raise MissingExtraError(action, error.name) from error
        raise UsageError(
            f"{action} fails: module {error.name!r} does not exist", position=_innermost_user_line(error)
        ) from error
    except SystemExit as error:
        raise UsageError(f"{action} ends the process", hint=_GUARD) from error
    except BaseException as error:  # user programs may define exceptions of any base class
        try:
            reason = next(iter(str(error).strip().splitlines()), "")
        except Exception:  # __str__ is user code too
            reason = "its message cannot be shown, because its __str__ fails"
        text = ": ".join(filter(None, (type(error).__name__, reason)))
        hint = next((hint for words, hint in (remedies or {}).items() if words in reason), None)
        raise UsageError(
            f"{action} fails: {text}", position=_innermost_user_line(error), hint=hint
        ) from error


class _Redirection:
    """State of the redirected standard output: the original stream, and the number of threads that run user
    code. The last of these threads to finish restores the stream.
    """

    lock = Lock()
    num_running = 0
    original: TextIO | None = None


@contextmanager
def _stdout_to_stderr() -> Generator[None]:
    """Redirect standard output to standard error in all threads, because it is shared by the process."""
    with _Redirection.lock:
        if not _Redirection.num_running:
            _Redirection.original, sys.stdout = sys.stdout, sys.stderr
        _Redirection.num_running += 1
    try:
        yield
    finally:
        with _Redirection.lock:
            _Redirection.num_running -= 1
            if not _Redirection.num_running:
                sys.stdout, _Redirection.original = cast("TextIO", _Redirection.original), None


def _innermost_user_line(error: BaseException) -> str | None:
    trace, position = error.__traceback__, None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_user_file(file):
            position = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return position
