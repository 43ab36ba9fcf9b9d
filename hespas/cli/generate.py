"""``hespas generate``: synthetic workloads of models, collectives and random programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from hespas.cli.entry import renamed_options
from hespas.cli.generate_llm import llm
from hespas.cli.generating import GivenOptions, generator_command
from hespas.generators.spec import Generator
from hespas.graph.hints import AtLeast, AtMost, Option

__all__ = ["app", "collectives", "dit", "dlrm", "eager", "random", "vit"]

app = typer.Typer(
    no_args_is_help=True,
    help="Generate workloads from settings: models at any parallelism, collectives, random jobs.",
)

_Ranks = Annotated[int, AtLeast(2), Option("Set the number of ranks.", metavar="N")]


@generator_command
def collectives(
    _given: GivenOptions,
    ranks: _Ranks,
    kinds: Annotated[
        str,
        Option(
            "Generate these collectives, separated by commas; also permute and ping_pong.", metavar="LIST"
        ),
    ] = "all_reduce,all_gather,reduce_scatter,all_to_all",
    sizes: Annotated[
        str, Option("Set buffer sizes: powers of two between A and B, or a list.", metavar="A-B|LIST")
    ] = "1KiB-1GiB",
    groups: Annotated[
        str, Option("Group ranks along axes of a mesh: 8x4:inner, 2x4x8:0,2.", metavar="SPEC")
    ] = "",
    repeat: Annotated[int, AtLeast(1), Option("Repeat each collective R times.", metavar="R")] = 1,
    dtype: Annotated[str, Option("Set the element type.", metavar="TYPE")] = "bf16",
    separate: Annotated[bool, Option("Add no dependencies between collectives.", flag="separate")] = False,
) -> Generator:
    """Generate collectives and messages of every size, in sequence.

    hespas generate collectives --kinds all_reduce,ping_pong --sizes 1MiB-64MiB --ranks 8 --out traces/
    """
    from hespas.generators.collectives import CollectiveBenchmark, parse_sizes

    return CollectiveBenchmark(
        kinds=tuple(kind.strip() for kind in kinds.split(",")), sizes=parse_sizes(sizes), ranks=ranks,
        groups=groups, repeat=repeat, dtype=dtype, separate=separate,
    )  # fmt: skip


@generator_command
def random(
    _given: GivenOptions,
    ranks: _Ranks,
    nodes: Annotated[int, AtLeast(1), Option("Set the number of events of the job.", metavar="M")] = 100,
    seed: Annotated[int, AtLeast(0), Option("Set the random seed.", metavar="S")] = 0,
    collective_share: Annotated[
        float, AtLeast(0), AtMost(1), Option("Set the fraction of events that are collectives.")
    ] = 0.2,
    p2p_share: Annotated[
        float, AtLeast(0), AtMost(1), Option("Set the fraction of events that are messages.")
    ] = 0.1,
    classes: Annotated[
        int, AtLeast(1), Option("Set the number of rank classes (distinct programs).", metavar="C")
    ] = 1,
    width: Annotated[
        int, AtLeast(1), Option("Limit the distance of dependencies to W nodes.", metavar="W")
    ] = 8,
    broken: Annotated[
        str,
        Option(
            "Add one violation: cycle, sizes, missing-receive, missing-collective, order.",
            flag="break",
            metavar="RULE",
        ),
    ] = "",
) -> Generator:
    """Generate a random valid job, or one with a single violation for tests of validators.

    hespas generate random --ranks 8 --nodes 1000 --classes 4 --seed 1 --out traces/
    """
    from hespas.generators.random_dag import RandomJob

    return RandomJob(
        ranks=ranks, nodes=nodes, seed=seed, collective_share=collective_share, p2p_share=p2p_share,
        classes=classes, width=width, broken=broken,
    )  # fmt: skip


_Images = Annotated[int, AtLeast(1), Option("Set images per rank.", metavar="N")]
_Replicas = Annotated[int, AtLeast(1), Option("Set data-parallel ranks.", metavar="N")]
_Sharded = Annotated[bool, Option("Shard weights, gradients and optimizer states.", flag="fsdp")]
_Type = Annotated[str, Option("Set the element type: bf16, f16, f32 (IEEE) or tf32.", metavar="TYPE")]
_Side = Annotated[int, AtLeast(0), Option("Set the image side in pixels (0: the model's).", metavar="PIXELS")]
_Layers = Annotated[int, AtLeast(0), Option("Set the number of blocks (0: the model's).", metavar="N")]


@generator_command
def vit(
    given: GivenOptions,
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
) -> Generator:
    """Generate a training step of a vision transformer, ViT-B/16.

    hespas generate vit --dp 8 --batch 64 --fsdp --out traces/
    """
    from hespas.generators.vision import VisionStep, vit_b_16

    model = vit_b_16()
    model = replace(model, image=image or model.image, layers=layers or model.layers)
    _check_fsdp(given, dp)
    return VisionStep(model=model, dp=dp, batch=batch, fsdp=fsdp, dtype=dtype)


@generator_command
def dit(
    given: GivenOptions,
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
) -> Generator:
    """Generate a training step of a diffusion transformer, DiT-XL/2. Its image is the latent, 32 wide.

    hespas generate dit --dp 8 --batch 32 --fsdp --out traces/
    """
    from hespas.generators.vision import VisionStep, dit_xl_2

    model = dit_xl_2()
    model = replace(model, image=image or model.image, layers=layers or model.layers)
    _check_fsdp(given, dp)
    return VisionStep(model=model, dp=dp, batch=batch, fsdp=fsdp, dtype=dtype)


def _check_fsdp(given: GivenOptions, dp: int) -> None:
    if dp == 1:
        given.warn_no_effect("fsdp", "one data-parallel rank has the whole state")


@generator_command
def eager(
    _given: GivenOptions,
    model: Annotated[
        str,
        Option(
            "Model: bert-large, gpt2-large, gpt3-2.7b, gpt3-xl, opt-1.3b or switch-xl-4.",
            metavar="MODEL",
            is_argument=True,
        ),
    ],
    batch: Annotated[int, AtLeast(1), Option("Set sequences per step.", metavar="N")] = 1,
    seq: Annotated[int, AtLeast(1), Option("Set the sequence length in tokens.", metavar="TOKENS")] = 512,
    train: Annotated[bool, Option("Add the backward pass (no optimizer).", flag="train")] = False,
    compiled: Annotated[
        bool, Option("Fuse between matmuls, as torch.compile does.", flag="compiled")
    ] = False,
) -> Generator:
    """Generate a transformer on one device as PyTorch runs it eagerly in float32.

    hespas generate eager gpt2-large --batch 4 --seq 1024 --out gpt2.json
    """
    from hespas.generators.eager import EagerStep, eager_model

    return EagerStep(model=eager_model(model), batch=batch, length=seq, training=train, compiled=compiled)


@generator_command
def dlrm(
    given: GivenOptions,
    ranks: Annotated[int, AtLeast(1), Option("Set the number of ranks.", metavar="N")] = 8,
    batch: Annotated[int, AtLeast(1), Option("Set samples per rank.", metavar="N")] = 2048,
    tables: Annotated[int, AtLeast(1), Option("Set the number of embedding tables.", metavar="N")] = 64,
    rows: Annotated[int, AtLeast(1), Option("Set rows per table.", metavar="N")] = 1_000_000,
    width: Annotated[int, AtLeast(1), Option("Set the embedding dimension.", metavar="N")] = 128,
    lookups: Annotated[int, AtLeast(1), Option("Set lookups per table and sample.", metavar="N")] = 32,
    sharding: Annotated[
        Literal["table", "row", "column"], Option("Shard embedding tables by table, row or column.")
    ] = "table",
    dtype: Annotated[
        str, Option("Set the element type: bf16, f16, f32 (IEEE) or tf32.", metavar="TYPE")
    ] = "f32",
) -> Generator:
    """Generate a training step of DLRM with embedding tables sharded over all ranks.

    hespas generate dlrm --ranks 16 --sharding row --out traces/
    """
    from hespas.generators.dlrm import DlrmStep

    if ranks == 1:
        given.warn_no_effect("sharding", "one rank has all tables")
    return DlrmStep(
        ranks=ranks, batch=batch, tables=tables, rows=rows, width=width, lookups=lookups,
        sharding=sharding, dtype=dtype,
    )  # fmt: skip


app.command(
    cls=renamed_options(
        {
            "--drafts": "--num-speculative-tokens",
            "--page": "--block-size",
            "--style": "--framework",
            "--cache": "--kv-cache-dtype",
        }
    )
)(llm)
app.command()(dlrm)
app.command()(vit)
app.command()(dit)
app.command()(eager)
app.command()(collectives)
app.command()(random)
