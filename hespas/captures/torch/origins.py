"""Origin of dispatched operations in the user's program: module, phase of the step, and source line."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from hespas.captures.torch.calls import StepPhase
from hespas.captures.torch.library import torch_module

__all__ = ["CallOrigin", "OriginTracker", "failing_line"]

_OWN_FOLDER = str(Path(__file__).parent)


class CallOrigin(NamedTuple):
    """Origin of a call, with the fields of :class:`hespas.captures.torch.calls.RecordedCall`."""

    module: str
    phase: str
    source: str


class OriginTracker:
    """Tracks the modules that are called, and the module of each autograd node."""

    def __init__(self) -> None:
        self.torch = torch_module()
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: list[Any] = []
        self._forward: dict[int, tuple[str, str]] = {}
        self._optimizer = ""
        self._library = str(Path(self.torch.__file__).parent)

    @contextmanager
    def tracking(self) -> Generator[None]:
        """Track calls of modules and optimizers inside the block."""
        modules = torch_module("torch.nn.modules.module")
        optimizers = torch_module("torch.optim.optimizer")

        def leave(*_: object) -> None:
            self._stack.pop()

        def begin_step(optimizer: Any, *_: object) -> None:
            self._optimizer = type(optimizer).__name__

        def end_step(*_: object) -> None:
            self._optimizer = ""

        hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(begin_step),
            optimizers.register_optimizer_step_post_hook(end_step),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def in_optimizer(self) -> bool:
        """True while an optimizer makes its step."""
        return bool(self._optimizer)

    def current(self) -> CallOrigin:
        """Return the origin of the operation that is being dispatched."""
        source = ""
        frame = inspect.currentframe()
        while frame is not None and not source:
            file = _display_name(frame.f_code.co_filename, self._library)
            source = f"{file}:{frame.f_lineno}" if file else ""
            frame = frame.f_back
        module = self._stack[-1] if self._stack else ""
        if self.torch._C._current_graph_task_id() >= 0:
            if self._stack:
                self._remember(module, source)
                return CallOrigin(module, StepPhase.RECOMPUTE, source)
            node = self.torch._C._current_autograd_node()
            forward = self._forward.get(node._sequence_nr()) if node is not None else None
            module, source = forward or ("", source)
            return CallOrigin(module, StepPhase.BACKWARD, source)
        if self._optimizer:
            return CallOrigin(self._optimizer, StepPhase.OPTIMIZER, source)
        self._remember(module, source)
        return CallOrigin(module, StepPhase.FORWARD, source)

    def _remember(self, module: str, source: str) -> None:
        """Store the origin by autograd's sequence number, which is assigned before the forward dispatch."""
        if self.torch.is_grad_enabled():
            self._forward.setdefault(self.torch.autograd._get_sequence_nr() - 1, (module, source))

    def _enter(self, root: Any, _: object) -> None:
        if id(root) not in self._names:
            self._roots.append(root)
            root_type = cast("Any", type(root))
            class_name = str(root_type.__name__)
            if any(base.__name__ == "FSDPModule" for base in root_type.__mro__):
                class_name = class_name.removeprefix("FSDP")  # FSDP derives its own class from the user's
            prefix = f"{self._stack[-1]}." if self._stack else ""
            for path, module in root.named_modules(prefix=f"{prefix}{class_name}"):
                self._names.setdefault(id(module), path)
        self._stack.append(self._names[id(root)])


def failing_line(error: BaseException) -> str | None:
    """Return the innermost line of the user's program that raised an error; None for errors elsewhere."""
    library = str(Path(torch_module().__file__).parent)
    line: str | None = None
    trace = error.__traceback__
    while trace is not None:
        file = _display_name(trace.tb_frame.f_code.co_filename, library)
        line = f"{file}:{trace.tb_lineno}" if file else line
        trace = trace.tb_next
    return line


@lru_cache(maxsize=4096)
def _display_name(filename: str, library: str) -> str:
    """Return a user's file relative to the working directory if possible; empty for other files."""
    if filename.startswith((library, _OWN_FOLDER, "<frozen", "<string>")) or "/contextlib.py" in filename:
        return ""
    path = Path(filename)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name
