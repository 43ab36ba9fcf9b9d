"""One rank of a job that is not there: a process group that answers at once, and tensors without data.

The fake process group is private API of PyTorch, which is why the extra pins its minor version. What in
PyTorch needs data, or time in proportion to the ranks, is replaced while a program is captured:

* ``_chunk_with_empty`` of FSDP makes one empty tensor for every rank without a shard: at 16,384 ranks that is
  minutes per model. Here only the shards that are looked at are made.
* Meshes of devices are tensors and are computed with: that happens on real ones.
* ``DistributedDataParallel`` compares parameters between ranks, numbers buckets in a tensor that C++ reads,
  and asks a collective for its result, which the fake process group does not have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from hespas.captures.torch.library import torch_module
from hespas.captures.torch.swap import swapped
from hespas.graph.errors import UsageError

__all__ = ["Rank", "rank_of_job"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Rank:
    """A rank while its program runs: the mesh of the job as PyTorch's own, and the world of its tensors."""

    def __init__(self, mesh: Any, tensors: Callable[[], AbstractContextManager[object]]) -> None:
        self.mesh = mesh
        self.tensors = tensors
        """Enter it to run the program: tensors that are made inside have no data, unless real are wanted."""


@contextmanager
def rank_of_job(
    rank: int, sizes: Sequence[int], names: Sequence[str], *, fake: bool, compiled: bool = False
) -> Generator[Rank]:
    """This process as one rank of a mesh of devices. What it changes in PyTorch is as before afterwards.
    ``compiled``: ``torch.compile`` makes graphs, which run operation by operation.

    Raises ``UsageError`` where a process group exists already.
    """
    distributed = torch_module("torch.distributed")
    if distributed.is_initialized():
        raise UsageError(
            "this process has a process group already; a capture makes its own",
            hint="call torch.distributed.destroy_process_group() first, or capture in a process of its own",
        )
    store = torch_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    num_ranks = 1
    for size in sizes:
        num_ranks *= size
    with ExitStack() as stack:
        stack.enter_context(_variables(rank, num_ranks))
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # it would prefix messages with a rank
        distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)
        stack.callback(_end_world)
        stack.enter_context(_replaced(fake=fake))
        if compiled:
            stack.enter_context(_compiling())
        make_mesh = torch_module("torch.distributed.device_mesh").init_device_mesh
        mesh = make_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
        yield Rank(mesh, lambda: _tensors(fake=fake, compiled=compiled))


@contextmanager
def _variables(rank: int, num_ranks: int) -> Generator[None]:
    """What a launcher tells a rank."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    told = (str(rank), str(num_ranks), "0", "1", "localhost", "29500")
    os.environ.update(zip(_VARIABLES, told, strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_world() -> None:
    """Forget the groups, and what DTensor keeps of the mesh of this rank."""
    torch_module("torch.distributed").destroy_process_group()
    torch_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    torch_module("torch.distributed.tensor._redistribute")._gen_transform_infos.cache_clear()
    torch_module("torch.distributed.tensor._collective_utils").MeshTopoInfo.build_from_mesh.cache_clear()


@contextmanager
def _compiling() -> Generator[None]:
    """What is compiled becomes the graphs of AOTAutograd, whose operations are dispatched one by one."""
    torch = torch_module()
    original = torch.compile

    def compile_(model: Any = None, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name not in {"backend", "mode", "options"}}
        return original(model, backend="aot_eager_decomp_partition", **kept)

    forget = torch_module("torch._dynamo").reset
    forget()  # a function that ran under a mode once is not compiled again
    with swapped(torch, "compile", compile_):
        try:
            yield
        finally:
            forget()


@contextmanager
def _tensors(*, fake: bool, compiled: bool) -> Generator[None]:
    mode = torch_module("torch._subclasses.fake_tensor").FakeTensorMode
    with mode(allow_non_fake_inputs=True) if fake else nullcontext(), _answers(compiled=compiled)():
        yield


def _answers(*, compiled: bool) -> Any:
    """A mode in which reductions have a result, numbers of buckets have data, and values can be read."""
    torch = torch_module()
    leaves = torch_module("torch.utils._pytree").tree_leaves
    fake_tensor = torch_module("torch._subclasses.fake_tensor")
    work = _work()

    def is_number(tensor: Any) -> bool:
        return tensor.dtype == torch.int32 and not isinstance(tensor, fake_tensor.FakeTensor)

    def dispatch(_: object, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        name = function._schema.name
        if name == "c10d::allreduce_":
            return args[0], work(args[0]).boxed()
        if name == "aten::_local_scalar_dense" and isinstance(args[0], fake_tensor.FakeTensor):
            return _one(args[0].dtype)
        if _Buckets.numbering:
            tensors = [each for each in leaves((args, named)) if isinstance(each, torch.Tensor)]
            makes = not tensors and named.get("dtype") is torch.int32
            if makes or (tensors and all(map(is_number, tensors))):
                with fake_tensor.unset_fake_temporarily():
                    return function(*args, **named)
        return function(*args, **named)

    base = torch_module("torch.utils._python_dispatch").TorchDispatchMode
    methods = {"__torch_dispatch__": dispatch, "ignore_compile_internals": staticmethod(lambda: compiled)}
    return type("AnswersMode", (base,), methods)


def _one(dtype: Any) -> object:
    if str(dtype) == "torch.bool":
        return True
    return 1.0 if dtype.is_floating_point else 1


def _work() -> Any:
    """A collective that is done and has its tensors as result."""
    torch = torch_module()
    base = torch_module("torch.distributed").Work
    kept: list[object] = []

    def start(self: Any, tensors: object) -> None:
        base.__init__(self)
        self.tensors = tensors
        kept[:] = [*kept[-64:], self]  # C++ keeps a reference to its own half only

    def future(self: Any) -> Any:
        done = torch.futures.Future()
        done.set_result(self.tensors)
        return done

    methods = {"__init__": start, "get_future": future, "wait": _yes, "is_completed": _yes}
    return type("DoneWork", (base,), methods)


def _yes(*_: object, **__: object) -> bool:
    return True


class _Buckets:
    """Whether buckets are numbered right now, which C++ does in tensors whose data it reads."""

    numbering = False


class _Shards:
    """The shards of a tensor over many ranks, of which only those that are looked at are made."""

    def __init__(self, tensor: Any, num_chunks: int, dim: int) -> None:
        self.tensor, self.num_chunks, self.dim = tensor, num_chunks, dim
        self.extent = -(-int(tensor.size(dim)) // num_chunks)

    def __len__(self) -> int:
        return self.num_chunks

    def __getitem__(self, place: int) -> Any:
        start = place * self.extent
        left = int(self.tensor.size(self.dim)) - start
        if left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.extent, left))


@contextmanager
def _replaced(*, fake: bool) -> Generator[None]:
    with ExitStack() as stack:
        fsdp = torch_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        stack.enter_context(swapped(fsdp, "_chunk_with_empty", _Shards))
        if fake:
            ddp = torch_module("torch.nn.parallel.distributed")
            check = "_verify_param_shape_across_processes"
            stack.enter_context(swapped(ddp, check, _yes))
            data_parallel = ddp.DistributedDataParallel
            stack.enter_context(swapped(data_parallel, "_pre_forward", _numbering(data_parallel)))
            mesh = torch_module("torch.distributed.device_mesh").DeviceMesh
            for name in ("__init__", "_create_flatten_mesh", "_unflatten", "_concatenate"):
                if hasattr(mesh, name):
                    stack.enter_context(swapped(mesh, name, _on_real(getattr(mesh, name))))
            stack.enter_context(swapped(mesh, "mesh", property(_on_real(mesh.mesh.fget))))
        yield


def _numbering(data_parallel: Any) -> Callable[..., Any]:
    original = data_parallel._pre_forward

    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _Buckets.numbering = True
        try:
            return original(self, *args, **kwargs)
        finally:
            _Buckets.numbering = False

    return pre_forward


def _on_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run with data, unseen by modes: no such computation is the program's."""
    modes = torch_module("torch.utils._python_dispatch")._disable_current_modes

    def on_real(*args: Any, **kwargs: Any) -> Any:
        with modes():
            return function(*args, **kwargs)

    return on_real
