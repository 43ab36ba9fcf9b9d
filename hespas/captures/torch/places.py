"""Where in the user's program an operation comes from: module, phase of the step, line of source."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from hespas.captures.torch.calls import Phase
from hespas.captures.torch.library import torch_module

__all__ = ["Place", "Places", "failing_line"]

_HERE = str(Path(__file__).parent)


class Place(NamedTuple):
    """See :class:`hespas.captures.torch.calls.Call`."""

    module: str
    phase: str
    source: str


class Places:
    """Follows the modules that are called, and which node of autograd belongs to which of them."""

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
        """Follow calls of modules and optimizers."""
        modules = torch_module("torch.nn.modules.module")
        optimizers = torch_module("torch.optim.optimizer")
        hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._begin_step),
            optimizers.register_optimizer_step_post_hook(self._end_step),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def in_optimizer(self) -> bool:
        """Whether an optimizer makes its step."""
        return bool(self._optimizer)

    def now(self) -> Place:
        """Of the operation that is dispatched now."""
        source = self._line()
        module = self._stack[-1] if self._stack else ""
        if self.torch._C._current_graph_task_id() >= 0:
            if self._stack:
                self._remember(module, source)
                return Place(module, Phase.RECOMPUTE, source)
            node = self.torch._C._current_autograd_node()
            made = self._forward.get(node._sequence_nr()) if node is not None else None
            return Place(made[0], Phase.BACKWARD, made[1]) if made else Place("", Phase.BACKWARD, source)
        if self._optimizer:
            return Place(self._optimizer, Phase.OPTIMIZER, source)
        self._remember(module, source)
        return Place(module, Phase.FORWARD, source)

    def _remember(self, module: str, source: str) -> None:
        """Autograd numbers a node right before its forward operation is dispatched."""
        if self.torch.is_grad_enabled():
            self._forward.setdefault(self.torch.autograd._get_sequence_nr() - 1, (module, source))

    def _enter(self, module: Any, _: object) -> None:
        if id(module) not in self._names:
            self._add_root(module)
        self._stack.append(self._names[id(module)])

    def _leave(self, *_: object) -> None:
        self._stack.pop()

    def _begin_step(self, optimizer: Any, *_: object) -> None:
        self._optimizer = type(optimizer).__name__

    def _end_step(self, *_: object) -> None:
        self._optimizer = ""

    def _add_root(self, root: Any) -> None:
        self._roots.append(root)
        above = f"{self._stack[-1]}." if self._stack else ""
        for path, module in root.named_modules(prefix=f"{above}{_class_name(root)}"):
            self._names.setdefault(id(module), path)

    def _line(self) -> str:
        frame = inspect.currentframe()
        while frame is not None:
            text = _shown(frame.f_code.co_filename, self._library)
            if text:
                return f"{text}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def failing_line(error: BaseException) -> str | None:
    """The innermost line of the user's program at which an error was raised; None where there is none."""
    library = str(Path(torch_module().__file__).parent)
    shown: str | None = None
    trace = error.__traceback__
    while trace is not None:
        text = _shown(trace.tb_frame.f_code.co_filename, library)
        shown = f"{text}:{trace.tb_lineno}" if text else shown
        trace = trace.tb_next
    return shown


def _class_name(module: Any) -> str:
    """FSDP gives modules a class of their own, before which the user's stands."""
    kind = cast("Any", type(module))
    is_sharded = any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    return str(kind.__name__.removeprefix("FSDP") if is_sharded else kind.__name__)


@lru_cache(maxsize=4096)
def _shown(filename: str, library: str) -> str:
    """How a file of the user is named: from the working directory where it is in there; empty for others."""
    if filename.startswith((library, _HERE, "<frozen", "<string>")) or "/contextlib.py" in filename:
        return ""
    path = Path(filename)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return path.name
