"""Layout of a job on its ranks: degrees of parallelism, rank numbers, groups, and the rules of valid layouts.

Ranks are numbered as in Megatron-Core, tensor parallelism fastest: ``rank = tp + TP * (cp + CP * (dp + DP *
pp))``. Experts use the ranks of a stage as another mesh: ``etp + ETP * (ep + EP * edp)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hespas.generators.llm.model import Attention, Block, Experts, LatentAttention, Mamba, Mlp, Model
from hespas.generators.llm.settings import Overlap, Training
from hespas.generators.spec import MOST_COUNT, beyond_bound
from hespas.graph import Permutation, StridedGroups
from hespas.graph.errors import UsageError

__all__ = [
    "BrokenRule",
    "Layout",
    "RankGroups",
    "broken_rules",
    "check_layout",
    "layers_of_stages",
    "micro_batches",
    "possible_overlap",
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism: data, tensor, pipeline, virtual stages per rank, context, expert, and tensor
    parallelism inside experts.

    ``zero``: 0 replicates the optimizer state, 1 shards it over data-parallel and context-parallel ranks, 2
    also shards gradients, 3 also weights (FSDP). ``shard``: number of data-parallel ranks over which one copy
    is sharded (0: all; fewer is hybrid sharding). ``sequence_parallel`` shards activations outside
    tensor-parallel regions over tensor-parallel ranks. ``layers_first``, ``layers_last``: layers of the first
    and last stage if they differ from other stages (-1: all equal). ``embedding_counts``, ``head_counts``:
    the embedding counts as a layer of the first chunk, the head as a layer of the last chunk (Megatron-Core:
    ``account_for_embedding_in_pipeline_split``).

    ``ring_attention`` sends keys around a ring of context-parallel ranks; otherwise they are gathered. With
    ``context_all_to_all``, context-parallel ranks exchange tokens for heads instead (arXiv 2309.14509).
    ``expert_node``: number of ranks in a node. A token is sent once to each node of its experts and forwarded
    inside the node, as in DeepEP (0: it is sent directly to the rank of each expert).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 1
    shard: int = 0
    sequence_parallel: bool = True
    layers_first: int = -1
    layers_last: int = -1
    embedding_counts: bool = False
    head_counts: bool = False
    ring_attention: bool = False
    context_all_to_all: bool = False
    expert_node: int = 0

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def replicas(self) -> int:
        """Number of copies of a weight among the ranks of a stage: data-parallel times context-parallel
        degree.
        """
        return self.dp * self.cp

    @property
    def sharded(self) -> int:
        """Return the number of ranks over which one copy of the optimizer state is sharded."""
        return (self.shard or self.dp) * self.cp

    @property
    def expert_sharded(self) -> int:
        """Number of ranks over which the optimizer state of an expert is sharded: the ranks of a shard group
        that hold the same experts.
        """
        return self.sharded * self.tp // (self.ep * self.etp)

    @property
    def has_sequence_parallel(self) -> bool:
        """True if activations outside tensor-parallel regions are sharded over tensor-parallel ranks."""
        return self.sequence_parallel and self.tp > 1


@dataclass(frozen=True)
class RankGroups:
    """Group sets and permutations of a layout, computed from strides instead of lists of ranks. Each group
    set divides all ranks of the job into disjoint groups.
    """

    layout: Layout

    def _along(self, *axes: str) -> StridedGroups:
        layout = self.layout
        shard = layout.shard or layout.dp
        sizes = {"pp": layout.pp, "replicate": layout.dp // shard, "dp": shard, "cp": layout.cp,
                 "tp": layout.tp}  # fmt: skip
        names = list(sizes)
        return StridedGroups.from_mesh(list(sizes.values()), [names.index(axis) for axis in axes])

    def _of_experts(self, *axes: str) -> StridedGroups:
        layout = self.layout
        copies = layout.dp // (layout.shard or layout.dp)
        sizes = {"pp": layout.pp, "replicate": copies, "edp": layout.expert_sharded, "ep": layout.ep,
                 "etp": layout.etp}  # fmt: skip
        names = list(sizes)
        return StridedGroups.from_mesh(list(sizes.values()), [names.index(axis) for axis in axes])

    @cached_property
    def tensor(self) -> StridedGroups:
        """Tensor-parallel groups: ranks that share the matrices of each layer."""
        return self._along("tp")

    @cached_property
    def context(self) -> StridedGroups:
        """Context-parallel groups: ranks that share each sequence."""
        return self._along("cp")

    @cached_property
    def data(self) -> StridedGroups:
        """Groups of ranks that hold the same weights: all data-parallel and context-parallel ranks of a
        stage.
        """
        return self._along("replicate", "dp", "cp")

    @cached_property
    def shards(self) -> StridedGroups:
        """Groups of ranks over which one copy of the optimizer state is sharded."""
        return self._along("dp", "cp")

    @cached_property
    def copies(self) -> StridedGroups:
        """Groups of ranks that hold the same shard of the optimizer state."""
        return self._along("replicate")

    @cached_property
    def experts(self) -> StridedGroups:
        """Expert-parallel groups: ranks over which experts are distributed."""
        return self._of_experts("ep")

    def _of_nodes(self, axis: str) -> StridedGroups:
        layout = self.layout
        inside = min(layout.ep, layout.expert_node)
        sizes = {"pp": layout.pp, "edp": layout.edp, "nodes": layout.ep // inside, "inside": inside}
        return StridedGroups.from_mesh(list(sizes.values()), [list(sizes).index(axis)])

    @cached_property
    def expert_nodes(self) -> StridedGroups:
        """Parts of the expert-parallel groups between nodes: ranks at the same position of their nodes."""
        return self._of_nodes("nodes")

    @cached_property
    def expert_inside(self) -> StridedGroups:
        """Parts of the expert-parallel groups inside a node."""
        return self._of_nodes("inside")

    @cached_property
    def expert_tensor(self) -> StridedGroups:
        """Expert tensor-parallel groups: ranks that share the matrices of each expert."""
        return self._of_experts("etp")

    @cached_property
    def expert_data(self) -> StridedGroups:
        """Groups of ranks that hold the same experts."""
        return self._of_experts("replicate", "edp")

    @cached_property
    def expert_shards(self) -> StridedGroups:
        """Groups of ranks over which one copy of the experts' optimizer state is sharded."""
        return self._of_experts("edp")

    @cached_property
    def expert_copies(self) -> StridedGroups:
        """Groups of ranks that hold the same shard of the same experts' state."""
        return self._of_experts("replicate")

    @cached_property
    def everyone(self) -> StridedGroups:
        """Group of all ranks.

        In a pipeline it is a separate communicator and not ASTRA-sim's world group: ASTRA-sim hangs in a
        collective of its world group if the ranks have issued different numbers of collectives before.
        """
        all_ranks = StridedGroups.all_ranks(self.layout.ranks)
        return replace(all_ranks, communicator=1) if self.layout.pp > 1 else all_ranks

    def to_stage(self, shift: int, *, wraps: bool = False) -> Permutation:
        """Return the messages from each pipeline stage to the stage ``shift`` after it."""
        layout = self.layout
        inner = layout.dp * layout.cp * layout.tp
        return Permutation(layout.ranks, (layout.pp, inner), shift, wraps)

    @cached_property
    def tensor_ring(self) -> Permutation:
        """Messages from each tensor rank to the next one of its ring."""
        return Permutation(self.layout.ranks, (self.layout.tp, 1), 1, wraps=True)

    def ring(self, shift: int = 1) -> Permutation:
        """Return the messages from each context-parallel rank to the rank ``shift`` further in its ring."""
        return Permutation(self.layout.ranks, (self.layout.cp, self.layout.tp), shift, wraps=True)


def micro_batches(layout: Layout, training: Training) -> int:
    """Return the number of micro-batches of a data-parallel rank in a step."""
    return training.global_batch // (layout.dp * training.micro_batch)


def layers_of_stages(model: Model, layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the layer numbers of each chunk of each pipeline stage.

    A chunk is a virtual stage. Chunk ``c`` of stage ``s`` is chunk ``c * pp + s`` in the order of layers, as
    in Megatron-Core's interleaved schedule; all are counted from 0. Layers of multi-token prediction belong
    to the chunk of the last layer.
    """
    count, chunks = len(model.layers), layout.pp * layout.vp
    slots = count + layout.embedding_counts + layout.head_counts
    sizes = [slots // chunks + (1 if chunk < slots % chunks else 0) for chunk in range(chunks)]
    sizes[0] -= layout.embedding_counts
    sizes[-1] -= layout.head_counts
    if layout.layers_first >= 0 or layout.layers_last >= 0:
        sizes = _uneven(count, layout)
    starts = [sum(sizes[:chunk]) for chunk in range(chunks)]
    spans = [tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    spans[-1] += tuple(range(count, count + model.mtp_layers))
    return tuple(
        tuple(spans[chunk * layout.pp + stage] for chunk in range(layout.vp)) for stage in range(layout.pp)
    )


def _uneven(count: int, layout: Layout) -> list[int]:
    """Return the number of layers of each chunk (virtual stage), for layouts whose first or last stage has a
    different number of layers.
    """
    first, last = layout.layers_first, layout.layers_last
    inner_stages = layout.pp - (first >= 0) - (last >= 0)
    inner_layers = count - max(first, 0) - max(last, 0)
    inner_chunks = inner_stages * layout.vp
    if (
        inner_stages < 0
        or inner_layers < 0
        or (inner_layers % inner_chunks if inner_chunks else inner_layers)
    ):
        raise UsageError(
            f"{inner_layers} layers do not divide over {inner_stages} stages of {layout.vp} chunks between a "
            f"first stage of {first} and a last of {last}",
            code="pp-divides-layers",
            hint="choose other sizes of the first and last stage",
        )
    sizes = [inner_layers // inner_chunks if inner_chunks else 0] * (layout.pp * layout.vp)
    for stage, layers in ((0, first), (layout.pp - 1, last)):
        if layers < 0:
            continue
        if layers % layout.vp:
            raise UsageError(
                f"the {layers} layers of stage {stage} do not divide over its {layout.vp} chunks",
                code="vp-divides-layers",
                hint="choose a number of layers that is a multiple of `vp`",
            )
        sizes[stage :: layout.pp] = [layers // layout.vp] * layout.vp
    return sizes


class BrokenRule(NamedTuple):
    """Rule that a layout violates: its name, the violation in a sentence, and a hint."""

    rule: str
    text: str
    hint: str


def check_layout(model: Model, layout: Layout, training: Training) -> None:
    """Raise ``UsageError`` that names the first violated rule, and the number of further ones."""
    violations = list(broken_rules(model, layout, training))
    if not violations:
        return
    first, *others = violations
    more = f" ({len(others)} more: {', '.join(violation.rule for violation in others)})" if others else ""
    raise UsageError(f"{first.text}{more}", code=first.rule, hint=first.hint)


def broken_rules(model: Model, layout: Layout, training: Training) -> Iterator[BrokenRule]:
    """Yield every rule that a layout violates."""
    counts = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "vp", "cp", "ep", "etp")}
    is_countable = min(counts.values()) >= 1
    counts |= {
        "seq": training.seq,
        "global-batch": training.global_batch,
        "micro-batch": training.micro_batch,
    }
    for name, value in counts.items():
        if value < 1:
            setting = name.replace("-", "_")
            yield BrokenRule(
                f"{name}-positive", f"{name} is {value}, but must be 1 or more", f"set `{setting}=1`"
            )
    if not is_countable:
        return
    too_large = list(_bounds(model, layout, training))
    yield from too_large
    if too_large:
        return
    yield from _divisions_of_model(model, layout, training)
    replica_batch = layout.dp * training.micro_batch
    if training.global_batch % replica_batch:
        yield BrokenRule(
            "batch-divides",
            f"a global batch of {training.global_batch:,} is not a multiple of dp x micro-batch = "
            f"{replica_batch:,}",
            "choose another `global_batch`, `micro_batch` or `dp`",
        )
    chunks = layout.pp * layout.vp
    if chunks > len(model.layers) + layout.embedding_counts + layout.head_counts:
        yield BrokenRule(
            "pp-divides-layers",
            f"{len(model.layers)} layers are fewer than {layout.pp} stages x {layout.vp} chunks",
            "choose a smaller `pp` or `vp`",
        )
    if layout.vp > 1 and layout.pp == 1:
        yield BrokenRule(
            "vp-needs-pp", f"{layout.vp} virtual stages need a pipeline", "set `vp=1`, or `pp=2` or more"
        )
    count = micro_batches(layout, training)
    if layout.vp > 1 and layout.pp > 1 and count % layout.pp:
        yield BrokenRule(
            "vp-micro-batches",
            f"interleaving needs a multiple of {layout.pp} micro-batches (the stages), not {count}",
            "choose another `global_batch`, or set `vp=1`",
        )
    if layout.vp > 1 and training.schedule in {"gpipe", "zero-bubble"}:
        yield BrokenRule(
            "vp-schedule",
            f"schedule {training.schedule} does not support virtual stages",
            "`schedule=interleaved`, or `vp=1`",
        )
    yield from _expert_rules(model, layout, training)
    yield from _unused_settings(model, layout, training)
    if layout.zero not in range(4):
        yield BrokenRule("zero-level", f"zero is {layout.zero}, but must be 0, 1, 2 or 3", "set `zero=1`")
    if layout.shard and (layout.shard < 0 or layout.dp % layout.shard):
        yield BrokenRule(
            "shard-divides-dp",
            f"{layout.dp} data-parallel ranks do not divide into shard groups of {layout.shard}",
            "choose a shard size that divides dp",
        )
    if layout.shard and not layout.zero:
        yield BrokenRule(
            "shard-needs-zero",
            f"shard groups of {layout.shard} shard nothing, because all ranks hold the whole state",
            "set `zero=1` or more, or shard over all data ranks",
        )


_MOST_RANKS, _MOST_TOKENS, _MOST_MICRO_BATCHES = 1 << 24, 1 << 40, 1 << 20
_MOST_PASSES, _MOST_RANK, _MOST_FACTOR = 1 << 16, 1 << 20, 1e6


def _bounds(model: Model, layout: Layout, training: Training) -> Iterator[BrokenRule]:
    """Yield a violation for each setting above its limit, which is larger than any real job. Every pass of a
    pipeline is written out, so larger settings would exhaust the memory of the generating machine.
    """
    passes = micro_batches(layout, training)
    written = layout.pp > 1 or training.overlap.microbatches
    run = passes * -(-len(model.layers) // layout.pp) if written else 0
    tokens = training.micro_batch * training.seq
    for name, what, value, most, setting in (
        ("ranks", "ranks", layout.ranks, _MOST_RANKS, "dp"),
        ("tokens", "tokens of a micro-batch", tokens, _MOST_TOKENS, "seq"),
        ("micro-batches", "micro-batches of a rank", passes, _MOST_MICRO_BATCHES, "global_batch"),
        ("passes", "passes of a stage, layers times micro-batches,", run, _MOST_PASSES, "global_batch"),
        ("lora", "the rank of adapters", training.lora_rank, _MOST_RANK, "lora_rank"),
        ("capacity", "the capacity factor", training.capacity, _MOST_FACTOR, "capacity"),
        ("imbalance", "the imbalance", training.imbalance, _MOST_FACTOR, "imbalance"),
    ):  # fmt: skip
        if not value <= most:
            shown = f"{value:,}" if value < 1e15 else f"{value:.0e}" if value < 1e300 else "far"
            yield BrokenRule(
                f"{name}-bounded", f"{what}: {shown} is beyond {most:,.0f}", f"choose a smaller `{setting}`"
            )
    for settings in (layout, training):
        for name, shown in beyond_bound(settings):
            yield BrokenRule(
                f"{name.replace('_', '-')}-bounded",
                f"{name}: {shown} is beyond {MOST_COUNT:,}",
                f"choose a smaller `{name}`",
            )


def _divisions_of_model(model: Model, layout: Layout, training: Training) -> Iterator[BrokenRule]:
    tp, cp = layout.tp, layout.cp
    blocks = list(dict.fromkeys(model.blocks()))
    for block in blocks:
        match block:
            case Attention() | LatentAttention() | Mamba():
                name, size = "heads", block.heads
            case Mlp():
                name, size = "ffn", block.ffn
            case Experts():
                name, size = "shared-ffn", block.shared_ffn
        if size % tp:
            yield BrokenRule(
                f"tp-divides-{name}",
                f"{name} {size:,} does not divide over {tp} tensor ranks",
                "choose a `tp` that divides it",
            )
        if isinstance(block, Attention) and block.kv_heads % tp and tp % block.kv_heads:
            yield BrokenRule(
                "tp-kv-heads",
                f"{block.kv_heads} key heads neither divide over {tp} tensor ranks nor repeat on them",
                "choose a `tp` that divides kv_heads, or a multiple of it",
            )
    yield from _exchanges(layout, blocks)
    parts = cp * (tp if layout.has_sequence_parallel else 1)
    if training.seq % (2 * cp if cp > 1 else 1) or training.seq % parts:
        divisor = (
            "twice the context ranks (a causal mask is balanced in two halves)"
            if cp > 1
            else f"{parts} ranks"
        )
        yield BrokenRule(
            "cp-divides-seq",
            f"a sequence of {training.seq:,} tokens does not divide over {divisor}",
            "choose another `seq` or `cp`",
        )


def _exchanges(layout: Layout, blocks: Sequence[Block]) -> Iterator[BrokenRule]:
    """Yield the violated rules of ``context_all_to_all``, where context-parallel ranks exchange tokens for
    heads.
    """
    tp, cp = layout.tp, layout.cp
    if cp == 1 or not layout.context_all_to_all:
        return
    if layout.ring_attention:
        yield BrokenRule(
            "cp-one-way",
            "context ranks either send keys around a ring or exchange tokens for heads, not both",
            "`ring_attention`, or `context_all_to_all`",
        )
    for block in blocks:
        if isinstance(block, Attention | LatentAttention) and block.heads % (tp * cp):
            yield BrokenRule(
                "cp-divides-heads",
                f"heads {block.heads:,} do not divide over {tp} tensor x {cp} context ranks that exchange "
                "them",
                "choose a `cp` that divides the heads of a tensor rank, or no `context_all_to_all`",
            )
        kv_heads = max(1, block.kv_heads // tp) if isinstance(block, Attention) else cp
        if kv_heads % cp and cp % kv_heads:
            yield BrokenRule(
                "cp-kv-heads",
                f"{kv_heads} key heads of a tensor rank neither divide over {cp} context ranks nor repeat",
                "choose a `cp` that divides them, or a multiple of them, or no `context_all_to_all`",
            )


def _expert_rules(model: Model, layout: Layout, training: Training) -> Iterator[BrokenRule]:
    mixtures = [block for block in dict.fromkeys(model.blocks()) if isinstance(block, Experts)]
    if not mixtures and (layout.ep > 1 or layout.etp > 1):
        yield BrokenRule(
            "ep-needs-experts", f"{model.name} has no experts to distribute", "set `ep=1` `etp=1`"
        )
    if mixtures and layout.tp > 1 and not layout.sequence_parallel:
        yield BrokenRule(
            "moe-needs-sequence-parallel",
            f"experts on {layout.tp} tensor ranks need sequence parallelism: each rank routes its own tokens",
            "set `sequence_parallel`, or `tp=1`",
        )
    stage = layout.dp * layout.cp * layout.tp
    if stage % (layout.ep * layout.etp):
        yield BrokenRule(
            "ep-divides-stage",
            f"the {stage:,} ranks of a stage do not divide by ep x etp = {layout.ep * layout.etp:,}",
            "choose an `ep` x `etp` that divides dp x cp x tp",
        )
    elif mixtures and layout.shard > 0 and (layout.sharded * layout.tp) % (layout.ep * layout.etp):
        yield BrokenRule(
            "ep-divides-shard",
            f"the {layout.sharded * layout.tp:,} ranks of a shard group do not divide by ep x etp = "
            f"{layout.ep * layout.etp:,}, so that a group does not hold whole copies of all experts",
            "choose larger shard groups, or an `ep` x `etp` that divides their ranks: shard x cp x tp",
        )
    for block in mixtures:
        if block.experts % layout.ep:
            yield BrokenRule(
                "ep-divides-experts",
                f"{block.experts} experts do not divide over {layout.ep} expert ranks",
                "choose an `ep` that divides them",
            )
        if block.ffn % layout.etp:
            yield BrokenRule(
                "etp-divides-ffn",
                f"experts of width {block.ffn:,} do not divide over {layout.etp} ranks",
                "choose an `etp` that divides it",
            )
    # Tokens that are sent to nodes first.
    node, ep = layout.expert_node, layout.ep
    if node and (node < 0 or (ep % node and node % ep)):
        yield BrokenRule(
            "expert-node",
            f"{ep} expert ranks neither fill nodes of {node} ranks nor divide one",
            "give the number of ranks of a node, or set `expert_node=0`",
        )
    if node and (layout.etp > 1 or training.capacity > 0):
        yield BrokenRule(
            "expert-node-dropless",
            "tokens that are sent once to each node need whole experts without a capacity limit",
            "set `etp=1` `capacity=0`, or `expert_node=0`",
        )


_PARTS: Mapping[str, tuple[type[Block], ...]] = {
    "core_attn": (Attention, LatentAttention),
    "qkv": (Attention, LatentAttention),
    "mla_up_proj": (LatentAttention,),
    "mlp": (Mlp,),
    "mlp_act": (Mlp,),
    "moe": (Experts,),
    "moe_act": (Experts,),
}
"""Blocks that contain a recomputable module; every block contains the modules that are not listed."""


def possible_overlap(overlap: Overlap, model: Model, layout: Layout, lora_rank: int) -> Overlap:
    """Return the part of the requested overlap of communication and computation that the model and the layout
    allow.

    Token dispatch can only overlap a shared expert, or a pass of another micro-batch: without a pipeline or
    with virtual stages. Collectives of tensor-parallel ranks overlap matmuls only with sequence parallelism
    and trained matrices.
    """
    pipelines = layout.tp == 1 or (layout.sequence_parallel and not lora_rank)
    mixtures = [block for block in model.blocks() if isinstance(block, Experts)]
    shares = any(block.shared_ffn for block in mixtures)
    sends = bool(mixtures) and layout.ep > 1 and (layout.pp == 1 or layout.vp > 1)
    return replace(
        overlap, tensor=overlap.tensor and pipelines, experts=overlap.experts and shares,
        microbatches=overlap.microbatches and sends,
    )  # fmt: skip


def _unused_settings(model: Model, layout: Layout, training: Training) -> Iterator[BrokenRule]:
    """Yield a violation for each setting that the model or the layout would ignore."""
    blocks = list(dict.fromkeys(model.blocks()))
    mixtures = [block for block in blocks if isinstance(block, Experts)]
    for name, value, without in (
        ("capacity", training.capacity, 0.0),
        ("imbalance", training.imbalance, 1.0),
        ("expert_node", layout.expert_node, 0),
    ):
        if not mixtures and value != without:
            yield BrokenRule(
                f"{name.replace('_', '-')}-needs-experts",
                f"{model.name} has no experts, to which {name} {value:g} applies",
                f"set `{name}={without:g}`",
            )
    for module in sorted(training.recompute.modules & _PARTS.keys()):
        if not any(isinstance(block, _PARTS[module]) for block in blocks):
            yield BrokenRule(
                "recompute-needs-module",
                f"{model.name} has no {module} to recompute",
                "remove it from `recompute`",
            )
    adapted = [
        block
        for block in blocks
        if isinstance(block, Attention | LatentAttention)
        or (
            not training.lora_attention_only
            and (isinstance(block, Mlp) or (isinstance(block, Experts) and block.shared_ffn > 0))
        )
    ]
    if training.lora_rank and not adapted:
        missing = "attention" if training.lora_attention_only else "attention or feed-forward blocks"
        yield BrokenRule(
            "lora-needs-linear-layers",
            f"{model.name} has no {missing} with linear layers for adapters: nothing would be trained",
            "`lora_rank=0`",
        )
    possible = possible_overlap(training.overlap, model, layout, training.lora_rank)
    if possible.experts != training.overlap.experts:
        yield BrokenRule(
            "overlap-needs-shared-expert",
            f"{model.name} has no shared expert that token dispatch could overlap",
            "remove experts from `overlap`",
        )
    if possible.microbatches != training.overlap.microbatches:
        yield BrokenRule(
            "overlap-needs-dispatch",
            "token dispatch overlaps other micro-batches only with several expert ranks, and in a pipeline "
            "only with virtual stages",
            "set `ep=2` or more and `vp=2` or more, or remove microbatches from `overlap`",
        )
    if possible.tensor != training.overlap.tensor:
        yield BrokenRule(
            "overlap-needs-sequence-parallel",
            "collectives of tensor ranks overlap products only with sequence parallelism and trained "
            "matrices",
            "set `sequence_parallel` `lora_rank=0`, or remove tensor from `overlap`",
        )
