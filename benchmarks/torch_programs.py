"""PyTorch programs as users write them: what is captured in tests, benchmarks and the guide.

Each function takes a mesh of devices and gives a step. They are small, and split in the usual ways.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

__all__ = ["PROGRAMS", "gpt", "moe", "pipeline", "resnet"]

torch: Any = import_module("torch")
nn: Any = torch.nn
functional: Any = import_module("torch.nn.functional")

if TYPE_CHECKING:

    class _Module:
        def __call__(self, *args: Any) -> Any: ...
        def parameters(self) -> Any: ...

else:
    _Module = nn.Module

Step = Callable[[], None]


class _Attention(_Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (
            weight(x).view(batch, length, -1, self.head).transpose(1, 2)
            for weight in (self.wq, self.wk, self.wv)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class _Block(_Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = _Attention(hidden, heads)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(_Module):
    """A decoder of blocks."""

    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(mesh: Any, *, vocabulary: int = 1024, hidden: int = 256, heads: int = 8, layers: int = 2) -> Step:
    """FSDP2 over the axis ``data``, and tensor parallel over ``model`` where there is one."""
    fully_shard = import_module("torch.distributed.fsdp").fully_shard
    parallel = import_module("torch.distributed.tensor.parallel")
    model = GPT(vocabulary, hidden, heads, layers)
    for block in model.blocks:
        if "model" in mesh.mesh_dim_names:
            columns = dict.fromkeys(
                ("attention.wq", "attention.wk", "attention.wv", "up"), parallel.ColwiseParallel()
            )
            rows = dict.fromkeys(("attention.wo", "down"), parallel.RowwiseParallel())
            parallel.parallelize_module(block, mesh["model"], columns | rows)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = (torch.randint(0, vocabulary, (2, 128)) for _ in range(2))

    def step() -> None:
        logits = model(tokens)
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Residual(_Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False) if channels != out else nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(y + self.short(x))


class ResNet(_Module):
    """Residual blocks between a stem and a classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        self.blocks = nn.Sequential(*(_Residual(a, b, 1 if a == b else 2) for a, b in pairwise(widths)))
        self.classifier = nn.Linear(512, classes)

    def forward(self, images: Any) -> Any:
        """Logits."""
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(images))), 3, 2, 1)
        return self.classifier(functional.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


def resnet(_: Any) -> Step:
    """Data parallel over all ranks: ``DistributedDataParallel`` and its buckets."""
    data_parallel = import_module("torch.nn.parallel").DistributedDataParallel
    model = data_parallel(ResNet(100), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 100, (4,))

    def step() -> None:
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class MoE(_Module):
    """Experts that are a DTensor over the ranks, to which tokens go by all-to-all."""

    def __init__(self, mesh: Any, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        tensor = import_module("torch.distributed.tensor")
        self.mesh, self.experts, self.chosen = mesh, experts, chosen
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(tensor.distribute_tensor(torch.randn(experts, *shape), mesh, [tensor.Shard(0)]))
            for shape in ((hidden, 4 * hidden), (4 * hidden, hidden))
        )

    def exchange(self, tokens: Any) -> Any:
        """Tokens to the ranks of their experts, or back."""
        ranks = self.mesh.size()
        parts = [tokens.shape[0] // ranks] * ranks
        send = import_module("torch.distributed._functional_collectives").all_to_all_single_autograd
        return send(tokens, parts, parts, self.mesh.get_group())

    def forward(self, x: Any) -> Any:
        """Each expert takes its share of the tokens."""
        tokens, hidden = x.shape
        weight, index = torch.topk(self.gate(x).softmax(-1), self.chosen)
        order = index.flatten().argsort()
        ranks = self.mesh.size()
        local, capacity = self.experts // ranks, self.chosen * tokens // self.experts
        y = self.exchange(x[order // self.chosen]).view(ranks, local, capacity, hidden).transpose(0, 1)
        y = y.reshape(local, ranks * capacity, hidden)
        y = torch.bmm(functional.gelu(torch.bmm(y, self.up.to_local())), self.down.to_local())
        y = self.exchange(y.view(local, ranks, capacity, hidden).transpose(0, 1).reshape(-1, hidden))
        return torch.zeros_like(x).index_add(0, order // self.chosen, y * weight.flatten()[order, None])


def moe(mesh: Any) -> Step:
    """A layer before experts that are split over the axis ``expert``."""
    layer = nn.Linear(64, 64)
    model = MoE(mesh["expert"], 64, 16, 2)
    optimizer = torch.optim.AdamW([*layer.parameters(), *model.parameters()])
    tokens = torch.randn(256, 64)

    def step() -> None:
        model(layer(tokens)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Stage(_Module):
    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64) if first else nn.Identity()
        self.block = _Block(64, 4)
        self.head = nn.Linear(64, 128) if last else nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.head(self.block(self.embedding(x)))


def pipeline(mesh: Any) -> Step:
    """Stages on the axis ``pipe``, in the order one forward, one backward."""
    library = import_module("torch.distributed.pipelining")
    axis = mesh["pipe"]
    place, count = axis.get_local_rank(), axis.size()
    model = _Stage(place == 0, place == count - 1)
    stage = library.PipelineStage(model, place, count, torch.device("cpu"), group=axis.get_group())
    schedule = library.Schedule1F1B(stage, n_microbatches=4, loss_fn=_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, targets = (torch.randint(0, 128, (8, 16)) for _ in range(2))

    def step() -> None:
        schedule.step(
            *((tokens,) if place == 0 else ()), **({"target": targets} if place == count - 1 else {})
        )
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss(logits: Any, targets: Any) -> Any:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


PROGRAMS: dict[str, Callable[[Any], Step]] = {
    "gpt": gpt,
    "resnet": resnet,
    "moe": moe,
    "pipeline": pipeline,
}
"""Name -> program."""
