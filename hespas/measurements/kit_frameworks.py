"""PyTorch and JAX as frameworks of the measurement kit (:mod:`hespas.measurements.kit`).

Inputs are normally distributed numbers, because the power of a chip depends on its data. PyTorch runs on the
accelerator that it finds, else on the CPU. Its times are from device events; on CUDA and ROCm the calls are
captured in a graph, so that the host does not delay them. JAX compiles one loop of all calls. Each call
depends on one element of the result before, so that XLA does not move it out of the loop; the write of this
element adds about a launch to the time.

Both are optional, and imported when a framework is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter_ns
from typing import Any, Literal

from hespas.graph.errors import MissingExtraError, UnsupportedError
from hespas.hardware.measure import TimedLoops
from hespas.measurements.kit import KitFramework, KitShape

__all__ = ["open_framework"]

_GRAPH_NS = 2_000_000
_MOST_IN_GRAPH = 20
"""Calls in a captured graph: enough to hide its launch, fewer for calls that are long."""


def open_framework(name: Literal["auto", "torch", "jax"]) -> KitFramework:
    """Return PyTorch or JAX; ``auto`` is PyTorch if it is installed, else JAX.

    Raises ``MissingExtraError`` if the package is not installed.
    """
    if name == "auto":
        name = "torch" if find_spec("torch") is not None else "jax"
    if find_spec(name) is None:
        raise MissingExtraError(f"measuring with {name}", name)
    return _Torch() if name == "torch" else _Jax()


class _Torch:
    name = "torch"

    def __init__(self) -> None:
        torch: Any = import_module("torch")
        self._torch, self.version = torch, str(torch.__version__)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device = accelerator or torch.device("cpu")
        self.kind = "cpu" if accelerator is None else "gpu"
        # Without graphs the host delays short calls.
        self.variant = "" if self._device.type in {"cpu", "cuda"} else "pytorch events"
        self.device = "CPU"
        if accelerator is not None:
            properties: Any = getattr(torch, accelerator.type)
            has_name = hasattr(properties, "get_device_name")
            self.device = str(properties.get_device_name()) if has_name else str(accelerator.type)

    def loops(self, shape: KitShape) -> TimedLoops:
        """Return a function that runs an operation a number of times and returns the time of all [ns]."""
        torch = self._torch
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()  # the tensors of the shape before
        with torch.inference_mode():
            call = self._call(shape)
            call()
        if self._device.type == "cpu":

            def on_host(count: int) -> float:
                with torch.inference_mode():
                    start = perf_counter_ns()
                    for _ in range(count):
                        call()
                    return perf_counter_ns() - start

            return on_host
        with torch.inference_mode():
            single_ns = self._between_events(call, 3) / 3
            if self._device.type != "cuda":
                return lambda count: self._between_events(call, count)
            in_graph = max(1, min(_MOST_IN_GRAPH, int(_GRAPH_NS / max(single_ns, 1.0))))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(in_graph):
                    call()

        def replayed(count: int) -> float:
            replays = -(-count // in_graph)
            return self._between_events(graph.replay, replays) * count / (replays * in_graph)

        return replayed

    def _between_events(self, call: Callable[[], object], count: int) -> float:
        torch = self._torch
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        with torch.inference_mode():
            torch.accelerator.synchronize()
            start.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e6

    def _call(self, shape: KitShape) -> Callable[[], object]:
        """Return a call of the operation of a shape, with its inputs."""
        torch, size = self._torch, shape.size
        types = {"bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.bfloat16}
        dtype = types.get(shape.dtype, torch.float32)

        def tensor(*extents: int) -> Any:
            return torch.randn(*extents, device=self._device).to(dtype)

        if shape.kind == "matmul":
            left, right = tensor(size("m"), size("k")), tensor(size("n"), size("k"))
            if shape.dtype != "fp8":
                return lambda: torch.nn.functional.linear(left, right)
            narrow = torch.float8_e4m3fn
            if torch.version.hip is not None and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName:
                narrow = torch.float8_e4m3fnuz
            weights, one = right.to(narrow).t(), torch.ones((), device=self._device)
            # Activations are received in 16 bits and quantised by a kernel of their own.
            return lambda: torch._scaled_mm(left.to(narrow), weights, one, one, out_dtype=dtype)
        if shape.kind.startswith("attention."):
            is_prompt = shape.kind == "attention.context"
            length = size("q_len") if is_prompt else size("kv_len")
            query = tensor(size("batch"), size("heads"), length if is_prompt else 1, size("head_dim"))
            key, value = (tensor(size("batch"), size("kv_heads"), length, size("head_dim")) for _ in range(2))
            attention = torch.nn.functional.scaled_dot_product_attention
            grouped = size("heads") != size("kv_heads")
            return lambda: attention(query, key, value, is_causal=is_prompt, enable_gqa=grouped)
        left, out = (tensor(size("rows"), size("columns")) for _ in range(2))
        right = tensor(size("rows"), size("columns"))
        calls: dict[str, Callable[[], object]] = {
            "add": lambda: torch.add(left, right, out=out),
            "copy": lambda: out.copy_(left),
            "sum": lambda: torch.sum(left, dim=-1),
            "softmax": lambda: torch.softmax(left, dim=-1),
        }
        return calls[shape.op]


class _Jax:
    name, variant = "jax", ""

    def __init__(self) -> None:
        jax: Any = import_module("jax")
        self._jax, self.version = jax, str(jax.__version__)
        first = jax.devices()[0]
        self.kind, self.device = str(first.platform), str(first.device_kind)
        self._is_cuda = "cuda" in str(first.client.platform_version).casefold()

    def loops(self, shape: KitShape) -> TimedLoops:
        """Return a function that runs an operation a number of times and returns the time of all [ns]."""
        jax = self._jax
        call, inputs = self._call(shape)
        compiled: dict[int, Any] = {}

        def run(inputs: Any, *, count: int) -> Any:
            first, *others = inputs

            def body(_: object, carried: Any) -> Any:
                # The next call depends on this one: XLA would move a call of constant inputs out of the loop.
                first, result = carried
                element = jax.numpy.clip(result.ravel()[0], -1, 1)
                first = first.at[(0,) * first.ndim].set(element)
                return first, call(first, *others)

            return jax.lax.fori_loop(0, count, body, (first, call(*inputs)))

        def timed(count: int) -> float:
            if count not in compiled:
                # The first call is outside of the loop.
                jitted = jax.jit(run, static_argnames="count")
                compiled[count] = jitted.lower(inputs, count=count - 1).compile()
                jax.block_until_ready(compiled[count](inputs))
            start = perf_counter_ns()
            jax.block_until_ready(compiled[count](inputs))
            return perf_counter_ns() - start

        return timed

    def _call(self, shape: KitShape) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the operation of a shape as a function, and its inputs."""
        jax, size = self._jax, shape.size
        jnp = jax.numpy
        dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16}.get(shape.dtype, jnp.float32)
        keys = iter(jax.random.split(jax.random.key(0), 4))

        def array(*extents: int) -> Any:
            return jax.random.normal(next(keys), extents, dtype)

        if shape.dtype == "fp8":
            raise UnsupportedError("JAX has no function of fp8 products with scales", hint="use torch")
        if shape.kind == "matmul":
            # XLA would compute f32 products in TF32 by default.
            precision = "highest" if shape.dtype == "f32_full" else None
            inputs = (array(size("m"), size("k")), array(size("k"), size("n")))
            return partial(jnp.matmul, precision=precision), inputs
        if shape.kind.startswith("attention."):
            is_prompt = shape.kind == "attention.context"
            length = size("q_len") if is_prompt else size("kv_len")
            query = array(size("batch"), length if is_prompt else 1, size("heads"), size("head_dim"))
            caches = (array(size("batch"), length, size("kv_heads"), size("head_dim")) for _ in range(2))
            kernel = "cudnn" if self._is_cuda and shape.dtype != "f32_full" else None
            attention = partial(jax.nn.dot_product_attention, is_causal=is_prompt, implementation=kernel)
            return attention, (query, *caches)
        left, right = array(size("rows"), size("columns")), array(size("rows"), size("columns"))
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "add": (jnp.add, (left, right)),
            "sum": (partial(jnp.sum, axis=-1), (left,)),
            "softmax": (partial(jax.nn.softmax, axis=-1), (left,)),
        }
        if shape.op not in calls:
            raise UnsupportedError(f"XLA removes a {shape.op} in a program", hint="use torch")
        return calls[shape.op]
