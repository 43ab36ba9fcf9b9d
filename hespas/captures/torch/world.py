"""Simulated environment of one rank: a fake process group, tensors without data, and shapes of pipeline
stages.

The fake process group is private API of PyTorch; the extra therefore pins its minor version. During a
capture, parts of PyTorch are replaced that need data, or time in proportion to the ranks:

* ``_chunk_with_empty`` of FSDP makes one empty tensor for every rank without a shard, which takes minutes per
  model at 16,384 ranks. The replacement makes only the shards that are used.
* Device meshes are tensors that PyTorch computes with; these computations run on real tensors.
* ``DistributedDataParallel`` compares parameters between ranks, numbers buckets in a tensor that C++ reads,
  and uses the result of a collective, which the fake process group does not have.
* Pipeline stages exchange shapes before their first step. Each rank runs alone: a rank that needs shapes of a
  rank that has not run yet stops with :class:`PeerNotRun`, and runs again after that rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import prod
from typing import Any, TypeVar

from hespas.captures.torch.library import replaced_attribute, torch_module
from hespas.graph.errors import UnsupportedError, UsageError

__all__ = ["PeerNotRun", "ShapeExchange", "SimulatedRank", "rank_of_job"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_Result = TypeVar("_Result")


class SimulatedRank:
    """Environment in which the program of one rank runs: the job's mesh as a PyTorch ``DeviceMesh``, and the
    tensor mode (tensors with or without data).
    """

    def __init__(self, mesh: Any, tensors: Callable[[], AbstractContextManager[object]]) -> None:
        """Set the mesh, and ``tensors``, which returns the context in which the program runs. Tensors that
        are made in this context have no data, unless real tensors are used.
        """
        self.mesh = mesh
        self.tensors = tensors


@contextmanager
def rank_of_job(
    rank: int, sizes: Sequence[int], names: Sequence[str], *, fake: bool, compiled: bool = False
) -> Generator[SimulatedRank]:
    """Make this process one rank of a device mesh inside the block; restore PyTorch afterwards.

    With ``compiled``, ``torch.compile`` makes graphs, whose operations run one by one.

    Raises ``UsageError`` if a process group exists already.
    """
    distributed = torch_module("torch.distributed")
    if distributed.is_initialized():
        raise UsageError(
            "this process has a process group already; a capture creates its own",
            hint="call torch.distributed.destroy_process_group() first, or capture in another process",
        )
    store = torch_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    num_ranks = prod(sizes)
    with ExitStack() as stack:
        stack.enter_context(_launcher_variables(rank, num_ranks))
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # PyTorch's prefixes messages with a rank
        distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)

        @stack.callback
        def destroy_groups() -> None:
            """Destroy the process groups, and clear DTensor's caches of this rank's mesh."""
            torch_module("torch.distributed").destroy_process_group()
            torch_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
            torch_module("torch.distributed.tensor._redistribute")._gen_transform_infos.cache_clear()
            topology = torch_module("torch.distributed.tensor._collective_utils").MeshTopoInfo
            topology.build_from_mesh.cache_clear()

        stack.enter_context(_replacements(fake=fake))
        if compiled:
            stack.enter_context(_compiled_graphs())
        make_mesh = torch_module("torch.distributed.device_mesh").init_device_mesh
        mesh = make_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))

        @contextmanager
        def tensors() -> Generator[None]:
            fake_mode = torch_module("torch._subclasses.fake_tensor").FakeTensorMode
            outer = fake_mode(allow_non_fake_inputs=True) if fake else nullcontext()
            with outer, _result_mode(compiled=compiled)():
                yield

        yield SimulatedRank(mesh, tensors)


@contextmanager
def _launcher_variables(rank: int, num_ranks: int) -> Generator[None]:
    """Set the environment variables that a launcher such as ``torchrun`` sets for a rank."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    values = (str(rank), str(num_ranks), "0", "1", "localhost", "29500")
    os.environ.update(zip(_VARIABLES, values, strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _compiled_graphs() -> Generator[None]:
    """Within the block, make ``torch.compile`` run the graphs of AOTAutograd operation by operation, so that
    they can be recorded.
    """
    torch = torch_module()
    original = torch.compile

    def compile_(model: Any = None, **options: Any) -> Any:
        others = {
            name: value for name, value in options.items() if name not in {"backend", "mode", "options"}
        }
        return original(model, backend="aot_eager_decomp_partition", **others)

    reset = torch_module("torch._dynamo").reset
    reset()  # a function that ran under a mode once is not compiled again
    with replaced_attribute(torch, "compile", compile_):
        try:
            yield
        finally:
            reset()


def _result_mode(*, compiled: bool) -> Any:
    """Return a dispatch mode that lets programs run without data. All-reduces return a result, the tensors in
    which DDP numbers its buckets have data, and reading a value from a tensor works.
    """
    torch = torch_module()
    leaves = torch_module("torch.utils._pytree").tree_leaves
    fake_tensor = torch_module("torch._subclasses.fake_tensor")
    work = _completed_work()

    def is_number(tensor: Any) -> bool:
        return tensor.dtype == torch.int32 and not isinstance(tensor, fake_tensor.FakeTensor)

    def dispatch(_: object, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        name = function._schema.name
        if name == "c10d::allreduce_":
            return args[0], work(args[0]).boxed()
        if name == "aten::_local_scalar_dense" and isinstance(args[0], fake_tensor.FakeTensor):
            if str(args[0].dtype) == "torch.bool":
                return True
            return 1.0 if args[0].dtype.is_floating_point else 1
        if _BucketNumbering.is_active:
            tensors = [leaf for leaf in leaves((args, named)) if isinstance(leaf, torch.Tensor)]
            makes = not tensors and named.get("dtype") is torch.int32
            if makes or (tensors and all(map(is_number, tensors))):
                with fake_tensor.unset_fake_temporarily():
                    return function(*args, **named)
        return function(*args, **named)

    base = torch_module("torch.utils._python_dispatch").TorchDispatchMode
    methods = {"__torch_dispatch__": dispatch, "ignore_compile_internals": staticmethod(lambda: compiled)}
    return type("AnswersMode", (base,), methods)


def _completed_work() -> Any:
    """Return the class of a finished collective, which returns its tensors as the result."""
    torch = torch_module()
    base = torch_module("torch.distributed").Work
    references: list[object] = []

    def start(self: Any, tensors: object) -> None:
        base.__init__(self)
        self.tensors = tensors
        references[:] = [*references[-64:], self]  # C++ holds a reference to its own half only

    def future(self: Any) -> Any:
        done = torch.futures.Future()
        done.set_result(self.tensors)
        return done

    methods = {"__init__": start, "get_future": future, "wait": _return_true, "is_completed": _return_true}
    return type("DoneWork", (base,), methods)


def _return_true(*_: object, **__: object) -> bool:
    return True


class _BucketNumbering:
    """Flag that is set while DDP numbers its buckets. DDP's C++ code then reads the data of tensors, so
    tensors without data cannot be used.
    """

    is_active = False


class _LazyShards:
    """List of the shards of a tensor over many ranks. A shard is made when it is accessed, because only one
    of them is used.
    """

    def __init__(self, tensor: Any, num_chunks: int, dim: int) -> None:
        self.tensor, self.num_chunks, self.dim = tensor, num_chunks, dim
        self.extent = -(-int(tensor.size(dim)) // num_chunks)

    def __len__(self) -> int:
        return self.num_chunks

    def __getitem__(self, index: int) -> Any:
        start = index * self.extent
        remaining = int(self.tensor.size(self.dim)) - start
        if remaining <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.extent, remaining))


@contextmanager
def _replacements(*, fake: bool) -> Generator[None]:
    with ExitStack() as stack:
        fsdp = torch_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        stack.enter_context(replaced_attribute(fsdp, "_chunk_with_empty", _LazyShards))
        if fake:
            ddp = torch_module("torch.nn.parallel.distributed")
            check = "_verify_param_shape_across_processes"
            stack.enter_context(replaced_attribute(ddp, check, _return_true))
            data_parallel = ddp.DistributedDataParallel
            original = data_parallel._pre_forward

            def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                _BucketNumbering.is_active = True
                try:
                    return original(self, *args, **kwargs)
                finally:
                    _BucketNumbering.is_active = False

            stack.enter_context(replaced_attribute(data_parallel, "_pre_forward", pre_forward))
            mesh = torch_module("torch.distributed.device_mesh").DeviceMesh
            for name in ("__init__", "_create_flatten_mesh", "_unflatten", "_concatenate"):
                if hasattr(mesh, name):
                    stack.enter_context(replaced_attribute(mesh, name, _without_modes(getattr(mesh, name))))
            stack.enter_context(replaced_attribute(mesh, "mesh", property(_without_modes(mesh.mesh.fget))))
        yield


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with real data outside of all dispatch modes, so that it is not
    recorded.
    """
    modes = torch_module("torch.utils._python_dispatch")._disable_current_modes

    def run(*args: Any, **kwargs: Any) -> Any:
        with modes():
            return function(*args, **kwargs)

    return run


class PeerNotRun(BaseException):
    """Signal that the rank ``peer`` must be run first, because the current rank needs the tensor shapes that
    it sends. It is not an ``Exception``, so that user code does not catch it.
    """

    def __init__(self, peer: int) -> None:
        """Store the rank that has to run first."""
        super().__init__(peer)
        self.peer = peer


class ShapeExchange:
    """Store of the tensor shapes that pipeline stages send to each other. A shape is found by rank and stage
    of the sender and of the receiver.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, int, int], object] = {}
        self._by_stage: dict[tuple[int, int], object] = {}
        """Shapes between two stages as sent by the first rank of a stage; assumed for its other ranks."""

    @contextmanager
    def on(self, rank: int) -> Generator[None]:
        """Make the pipeline stages of a rank exchange tensor shapes through this object inside the block.

        All stages infer shapes by running. PyTorch would decide that by a vote of all ranks, but here each
        rank runs alone.
        """
        stage_module = torch_module("torch.distributed.pipelining.stage")
        schedule = torch_module("torch.distributed.pipelining.schedules")._PipelineSchedule
        sent, by_stage = self.sent, self._by_stage

        def send(self: Any, meta: object, to_stage: int) -> None:
            sent[rank, self.stage_index, self._resolve_peer_global_rank(to_stage), to_stage] = meta
            by_stage.setdefault((self.stage_index, to_stage), meta)

        def receive(self: Any, from_stage: int) -> object:
            peer = self._resolve_peer_global_rank(from_stage)
            key = (peer, from_stage, rank, self.stage_index)
            pair = (from_stage, self.stage_index)
            if key not in sent and pair not in by_stage:
                raise PeerNotRun(peer)
            return sent[key] if key in sent else by_stage[pair]

        def agree(_: object, stages: list[Any], *__: object) -> None:
            for stage in stages:
                stage._inference_mode = stage_module.InferenceMode.DYNAMIC

        with ExitStack() as stack:
            stack.enter_context(replaced_attribute(stage_module.PipelineStage, "_send_meta", send))
            stack.enter_context(replaced_attribute(stage_module.PipelineStage, "_recv_meta", receive))
            stack.enter_context(replaced_attribute(schedule, "_warmup_p2p", agree))
            yield

    def run_in_order(self, rank: int, run: Callable[[int], _Result]) -> dict[int, _Result]:
        """Run a rank and, before it, the ranks that send it tensor shapes. Return the results of all these
        ranks, by rank.

        Raises ``UnsupportedError`` if ranks wait for each other.
        """
        results: dict[int, _Result] = {}
        waiting = [rank]
        num_sent: dict[tuple[int, int], int] = {}
        while waiting:
            current = waiting[-1]
            if current in results:
                waiting.pop()
                continue
            try:
                results[current] = run(current)
            except PeerNotRun as missing:
                if num_sent.get((current, missing.peer)) == len(self.sent):
                    raise UnsupportedError(
                        f"stages of ranks {current} and {missing.peer} wait for each other's shapes",
                        hint="give PipelineStage its input_args and output_args",
                    ) from missing
                num_sent[current, missing.peer] = len(self.sent)
                waiting.append(missing.peer)
        return results
