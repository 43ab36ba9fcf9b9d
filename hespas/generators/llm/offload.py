"""What moves to the memory of the host and back: kept activations, and the states of the optimizer.

Activations of a layer leave when its forward pass is done, and return before its backward pass, while the
layer behind it still works. An optimizer on the host (arXiv 2101.06840) takes gradients down, updates there,
and sends updated weights up. Bytes are those that the memory account leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hespas.generators.llm.kept import kept_of_layer
from hespas.generators.llm.kernels import Kernels, Tensor, Value
from hespas.generators.llm.model import Block, Experts, Layer, Mlp
from hespas.generators.llm.rank import Rank

__all__ = ["bytes_away", "load_activations", "ports_away", "store_activations"]


def bytes_away(rank: Rank, layer: Layer, place: int) -> int:
    """Bytes of what the ``place``-th layer of a stage keeps on the host."""
    training = rank.training
    if not training.recompute.offloaded:
        return 0
    here = replace(training.recompute, offloaded=frozenset())
    whole = replace(rank, training=replace(training, recompute=here))
    return sum(kept_of_layer(whole, layer, place).values()) - sum(kept_of_layer(rank, layer, place).values())


_LINEAR = frozenset({"fc1", "act"})
_PROJECTED = frozenset({"qkv", "qk_normed", "kv", "exchanged"})
_NORMED = frozenset({"norm", "qkv_input", "fc1_input", "in_input", "shared.fc1_input"})
_PORTS: Mapping[str, frozenset[str]] = {
    "layernorm": _NORMED,
    "qkv": _PROJECTED,
    "mla_up_proj": _PROJECTED,
    "mlp_act": frozenset({"act"}),
    "moe_act": frozenset({"act"}),
    "mlp": _LINEAR,
    "moe": _LINEAR | {"arrived", "scores", "combined", "shared.fc1", "shared.act"},
}
"""Ports of the values of a block that are of a module."""
_OF: Mapping[str, type[Block]] = {"mlp_act": Mlp, "mlp": Mlp, "moe_act": Experts, "moe": Experts}


def ports_away(rank: Rank, layer: Layer, number: int, place: int, ports: Iterable[str]) -> list[str]:
    """Those of the forward ``ports`` of the ``place``-th layer of a stage whose values are on the host."""
    recompute = rank.training.recompute
    if recompute.whole(place):
        return [f"{number}.0.input"]
    found: list[str] = []
    for port in ports:
        own, _, rest = port.partition(".")
        position, _, name = rest.partition(".")
        if own == str(number) and _is_away(layer[int(position)], name, recompute.offloaded):
            found.append(port)
    return found


def _is_away(block: Block, name: str, offloaded: frozenset[str]) -> bool:
    """Whether the value of a port of a block is on the host."""
    of_block = (each for each in offloaded if isinstance(block, _OF.get(each, object)))
    return "block" in offloaded or any(name in _PORTS.get(each, ()) for each in of_block)


def store_activations(k: Kernels, number: int, size: int) -> None:
    """Send what a layer keeps to the host, once its forward pass is done."""
    k.module = f"layers.{number}"
    k.transfer(
        "activations.offload", Tensor((size,), "u8"), stores=True, after=[k.part.tail], port=f"away.{number}"
    )


def load_activations(k: Kernels, number: int, size: int, ahead: int, ports: Sequence[str]) -> int:
    """Fetch it, behind the node ``ahead``; what reads one of the ``ports`` reads what came."""
    k.module = f"layers.{number}"
    after: list[Value] = [f"away.{number}"]
    node = k.transfer("activations.reload", Tensor((size,), "u8"), stores=False, after=after, control=[ahead])
    if ahead < 0:
        k.part.begins.append(node)
    k.local.update(dict.fromkeys(ports, node))
    return node
