"""A transformer training step in PyTorch, captured for 512 devices that nobody has, and predicted.

``python examples/train_torch.py [--system dgx-h100] [--data 64] [--model 8]``

The function ``build`` also works with the command line::

    cd examples; hespas capture train_torch:build --mesh data=64,model=8 --out traces
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hespas

__all__ = ["build", "main"]

_LAYERS, _WIDTH, _HEADS, _TOKENS, _BATCH = 4, 4096, 32, 2048, 4


class Block(nn.Module):
    """Layer of a transformer; ``heads`` is the number of attention heads on one device."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer, shape ``(batch, tokens, width)``."""
        normed = self.norm1(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build(mesh: Any) -> Callable[[], None]:
    """Return a function that runs one step of a model with FSDP over ``data`` and tensor parallelism over
    ``model``.
    """
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = [Block(_HEADS // mesh["model"].size()) for _ in range(_LAYERS)]
    for block in blocks:
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        parallelize_module(block, mesh["model"], columns | dict.fromkeys(("out", "down"), RowwiseParallel()))
        fully_shard(block, mesh=mesh["data"], mp_policy=precision)
    model = nn.Sequential(*blocks)
    fully_shard(model, mesh=mesh["data"], mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(_BATCH, _TOKENS, _WIDTH)

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(arguments: list[str] | None = None) -> float:
    """Capture and predict the step, print both, and return the predicted time in nanoseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", default="dgx-h100")
    parser.add_argument("--data", type=int, default=64)
    parser.add_argument("--model", type=int, default=8)
    chosen = parser.parse_args(arguments)
    captured = hespas.capture(build, mesh={"data": chosen.data, "model": chosen.model})
    print(captured)
    step = hespas.simulate(captured.workload, system=chosen.system)
    print(step)
    return step.step_ns


if __name__ == "__main__":
    main()
