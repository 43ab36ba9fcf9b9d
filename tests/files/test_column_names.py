"""Tables of every kind that name a column twice are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import hespas
from hespas.api.request_log import requests_of
from hespas.generators.llm.model_file import model_in_table
from hespas.generators.llm.published import rows_of
from hespas.graph.errors import FormatError

HEADERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "request log": (
        "arrival_s,prompt_tokens,prompt_tokens,output_tokens",
        requests_of,
    ),
    "request log, other case": (
        "arrival_s,prompt_tokens, Prompt_Tokens,output_tokens",
        requests_of,
    ),
    "models": ("model,hidden,hidden", lambda path: model_in_table(path, "0")),
    "published runs": (
        "model,accelerator,num_accelerators,seq_len,global_batch,global_batch",
        lambda path: list(rows_of(path)),
    ),
    "device events": (
        "hardware,op,op,op_class,kernel,rank,stream,start_ns,duration_ns",
        hespas.read,
    ),
    "measured operations": (
        "hardware,kind,m,m,n,k,time_us",
        lambda path: hespas.calibrate("H100-SXM", table=path),
    ),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_column_that_is_named_twice_is_refused(kind: str, tmp_path: Path) -> None:
    header, read = HEADERS[kind]
    path = tmp_path / "table.csv"
    path.write_text(f"{header}\n{','.join('0' for _ in header.split(','))}\n")
    with pytest.raises(FormatError, match=r"several columns|appears twice"):
        read(path)
