"""``hespas generate``: workloads from settings alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from hespas.cli.generate_llm import llm
from hespas.cli.generating import Asked, making
from hespas.generators.spec import Generator

__all__ = ["app", "collectives", "dit", "dlrm", "eager", "random", "vit"]

app = typer.Typer(no_args_is_help=True, help="Make workloads from settings alone: models at any parallelism.")

# --- benchmarks and random programs

_Ranks = Annotated[int, typer.Option(min=2, metavar="N", help="Ranks of the job.")]


@making()
def collectives(
    _asked: Asked,
    ranks: _Ranks,
    kinds: Annotated[
        str, typer.Option(metavar="LIST", help="Collectives with commas; also permute and ping_pong.")
    ] = "all_reduce,all_gather,reduce_scatter,all_to_all",
    sizes: Annotated[
        str, typer.Option(metavar="A-B|LIST", help="Whole buffers: powers of two between, or a list.")
    ] = "1KiB-1GiB",
    groups: Annotated[
        str, typer.Option(metavar="SPEC", help="Groups along axes of a mesh: 8x4:inner, 2x4x8:0,2.")
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, metavar="R", help="How often each.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Element type.")] = "bf16",
    separate: Annotated[bool, typer.Option("--separate", help="None waits for another.")] = False,
) -> Generator:
    """Collectives and messages of every size, one after another.

    hespas generate collectives --kinds all_reduce,ping_pong --sizes 1MiB-64MiB --ranks 8 --out traces/
    """
    from hespas.generators.collectives import CollectiveBenchmark, parse_sizes

    return CollectiveBenchmark(
        kinds=tuple(each.strip() for each in kinds.split(",")), sizes=parse_sizes(sizes), ranks=ranks,
        groups=groups, repeat=repeat, dtype=dtype, separate=separate,
    )  # fmt: skip


@making()
def random(
    _asked: Asked,
    ranks: _Ranks,
    nodes: Annotated[int, typer.Option(min=1, metavar="M", help="Events of the job.")] = 100,
    seed: Annotated[int, typer.Option(metavar="S", help="Equal seeds make equal jobs.")] = 0,
    collective_share: Annotated[float, typer.Option(min=0, max=1, help="Of events.")] = 0.2,
    p2p_share: Annotated[float, typer.Option(min=0, max=1, help="Messages, of events.")] = 0.1,
    classes: Annotated[int, typer.Option(min=1, metavar="C", help="Programs of ranks that differ.")] = 1,
    width: Annotated[int, typer.Option(min=1, metavar="W", help="How far back a node may wait.")] = 8,
    broken: Annotated[
        str,
        typer.Option(
            "--break",
            metavar="RULE",
            help="End with one violation: cycle, sizes, missing-receive, missing-collective, order.",
        ),
    ] = "",
) -> Generator:
    """A random job that no simulator may hang on, or with one violation that validators must find.

    hespas generate random --ranks 8 --nodes 1000 --classes 4 --seed 1 --out traces/
    """
    from hespas.generators.random_dag import RandomJob

    return RandomJob(
        ranks=ranks, nodes=nodes, seed=seed, collective_share=collective_share, p2p_share=p2p_share,
        classes=classes, width=width, broken=broken,
    )  # fmt: skip


# --- vision and diffusion transformers

_Images = Annotated[int, typer.Option(min=1, metavar="N", help="Images of each rank.")]
_Replicas = Annotated[int, typer.Option(min=1, metavar="N", help="Data-parallel ranks.")]
_Sharded = Annotated[bool, typer.Option("--fsdp", help="Shard weights, gradients and states.")]
_Type = Annotated[str, typer.Option(metavar="TYPE", help="bf16, f16, f32 (IEEE) or tf32.")]
_Side = Annotated[int, typer.Option(min=0, metavar="PIXELS", help="Side of an image (0: the model's own).")]
_Layers = Annotated[int, typer.Option(min=0, metavar="N", help="Blocks (0: the model's own).")]


@making()
def vit(
    asked: Asked,
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
) -> Generator:
    """A training step of a vision transformer, ViT-B/16.

    hespas generate vit --dp 8 --batch 64 --fsdp --out traces/
    """
    from hespas.generators.vision import VisionStep, vit_b_16

    model = vit_b_16()
    model = replace(model, image=image or model.image, layers=layers or model.layers)
    _one_rank(asked, dp)
    return VisionStep(model=model, dp=dp, batch=batch, fsdp=fsdp, dtype=dtype)


@making()
def dit(
    asked: Asked,
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
) -> Generator:
    """A training step of a diffusion transformer, DiT-XL/2; the image is its latent, of side 32.

    hespas generate dit --dp 8 --batch 32 --fsdp --out traces/
    """
    from hespas.generators.vision import VisionStep, dit_xl_2

    model = dit_xl_2()
    model = replace(model, image=image or model.image, layers=layers or model.layers)
    _one_rank(asked, dp)
    return VisionStep(model=model, dp=dp, batch=batch, fsdp=fsdp, dtype=dtype)


def _one_rank(asked: Asked, dp: int) -> None:
    if dp == 1:
        asked.has_no_effect("fsdp", "one data rank has all of the state")


# --- what frameworks run without a compiler


@making()
def eager(
    _asked: Asked,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="bert-large, gpt2-large, gpt3-2.7b, gpt3-xl, opt-1.3b, switch-xl-4."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences.")] = 1,
    seq: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Length of a sequence.")] = 512,
    train: Annotated[bool, typer.Option("--train", help="Backward too (no optimizer).")] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Fuse between products, as torch.compile does.")
    ] = False,
) -> Generator:
    """A transformer on one device as PyTorch runs it in float32, one operator after another.

    hespas generate eager gpt2-large --batch 4 --seq 1024 --out gpt2.json
    """
    from hespas.generators.eager import EagerStep, eager_model

    return EagerStep(model=eager_model(model), batch=batch, length=seq, training=train, compiled=compiled)


# --- recommendation models


@making()
def dlrm(
    asked: Asked,
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks of the job.")] = 8,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Samples of each rank.")] = 2048,
    tables: Annotated[int, typer.Option(min=1, metavar="N", help="Embedding tables.")] = 64,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of each.")] = 1_000_000,
    width: Annotated[int, typer.Option(min=1, metavar="N", help="Width of a row.")] = 128,
    lookups: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of a table for a sample.")] = 32,
    sharding: Annotated[
        Literal["table", "row", "column"], typer.Option(help="How tables are spread over ranks.")
    ] = "table",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, f16, f32 (IEEE) or tf32.")] = "f32",
) -> Generator:
    """A training step of a recommendation model with tables spread over all ranks.

    hespas generate dlrm --ranks 16 --sharding row --out traces/
    """
    from hespas.generators.dlrm import DlrmStep

    if ranks == 1:
        asked.has_no_effect("sharding", "one rank has all tables")
    return DlrmStep(
        ranks=ranks, batch=batch, tables=tables, rows=rows, width=width, lookups=lookups,
        sharding=sharding, dtype=dtype,
    )  # fmt: skip


app.command()(llm)
app.command()(dlrm)
app.command()(vit)
app.command()(dit)
app.command()(eager)
app.command()(collectives)
app.command()(random)
