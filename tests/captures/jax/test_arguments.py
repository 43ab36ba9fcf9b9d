from __future__ import annotations

import pytest

from hespas.captures.jax.calls import ArrayArgument, parse_arguments
from hespas.graph.errors import UsageError


def test_types_with_shardings() -> None:
    assert parse_arguments("bf16[8,4]@data,model; i32[8]@data ;f32[]; u8[2,3]@-,x+y;") == [
        ArrayArgument("bfloat16", (8, 4), (("data",), ("model",))),
        ArrayArgument("int32", (8,), (("data",),)),
        ArrayArgument("float32", (), None),
        ArrayArgument("uint8", (2, 3), ((), ("x", "y"))),
    ]


@pytest.mark.parametrize(
    "text", ["bf16", "bf16[8", "[8]", "f32[a]", "f32[8]@x,y", "f32[" + "9" * 30 + "]", "f32[-1]"]
)
def test_other_texts_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(text)
    assert "bf16[8192,1024]@data,model" in (caught.value.hint or "")
