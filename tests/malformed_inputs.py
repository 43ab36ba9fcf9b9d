"""Inputs that no reader accepts, by format: small programs with one error each."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence

__all__ = [
    "ACCEPTED",
    "CHAKRA",
    "DEEP",
    "DOUBLING",
    "HLO",
    "JSON",
    "JUNK",
    "STABLEHLO",
    "et_chain",
    "et_file",
    "et_frame_ends",
    "et_node",
    "hlo_chain",
    "json_chain",
    "json_graph",
    "many_devices",
    "mlir_chain",
]

_DEEP = 100_000
_RANDOM = random.Random(20_240_229)


def varint(value: int) -> bytes:
    """Seven bits a byte, low ones first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def _framed(*messages: bytes) -> bytes:
    return b"".join(varint(len(message)) + message for message in messages)


ON_DEVICE = _bytes(10, _bytes(1, b"is_cpu_op") + _number(27, 0))
_METADATA = _bytes(1, b"0.0.4")


def et_node(
    number: int, data: Sequence[int] = (), control: Sequence[int] = (), *, kind: int = 4, rest: bytes = b""
) -> bytes:
    """A Chakra ``Node``; ``rest`` are further fields as they stand in the file."""
    deps = b"".join(
        _bytes(field, b"".join(map(varint, ids))) for field, ids in ((4, control), (5, data)) if ids
    )
    return _number(1, number) + _bytes(2, b"n") + _number(3, kind) + deps + ON_DEVICE + rest


def et_file(*nodes: bytes, metadata: bytes = _METADATA) -> bytes:
    """A Chakra trace of these messages."""
    return _framed(metadata, *nodes)


def et_frame_ends(data: bytes) -> set[int]:
    """Return the ends of frames. A trace has no end mark, so a trace cut at one of them is valid."""
    ends: set[int] = set()
    at = 0
    while at < len(data):
        length = shift = 0
        while data[at] > 0x7F:
            length |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        at += 1 + (length | data[at] << shift)
        ends.add(at)
    return ends


def et_chain(count: int, *, ring: bool = False) -> bytes:
    """Each node waits for the one before; in a ring the first waits for the last."""
    first = [count - 1] if ring else []
    return et_file(*(et_node(number, [number - 1] if number else first) for number in range(count)))


def json_graph(*nodes: object, **fields: object) -> bytes:
    """An op-graph document."""
    return json.dumps({"schema": "hespas.op-graph/1", **fields, "nodes": nodes}).encode()


def json_chain(count: int, *, ring: bool = False) -> bytes:
    """As :func:`et_chain`."""
    first = [count - 1] if ring else []
    return json_graph(
        *({"id": number, "op": "x", "deps": [number - 1] if number else first} for number in range(count))
    )


def mlir_chain(count: int) -> bytes:
    """Additions one behind the other."""
    lines = "".join(f"%{i} = stablehlo.add %{i - 1}, %a : tensor<f32>\n" for i in range(1, count))
    return _mlir(f"%0 = stablehlo.add %a, %a : tensor<f32>\n{lines}", f"%{count - 1}")


def hlo_chain(count: int) -> bytes:
    """As :func:`mlir_chain`."""
    lines = "".join(f"  a{i} = f32[4] add(a{i - 1}, a0)\n" for i in range(1, count))
    body = f"  a0 = f32[4] parameter(0)\n{lines}  ROOT r = f32[4] add(a{count - 1}, a0)\n"
    return f"HloModule m\n\nENTRY e {{\n{body}}}\n".encode()


def _mlir(body: str, result: str = "%a", attributes: str = "") -> bytes:
    head = f"module {attributes} {{\nfunc.func public @main(%a: tensor<f32>) -> tensor<f32> {{\n"
    return f"{head}{body}\nreturn {result} : tensor<f32>\n}}\n}}\n".encode()


def _hlo(body: str, header: str = "", before: str = "") -> bytes:
    return f"HloModule m{header}\n\n{before}ENTRY e {{\n  a = f32[4] parameter(0)\n  {body}\n}}\n".encode()


def _node(**fields: object) -> dict[str, object]:
    return {"id": 0, "op": "x", "deps": [], **fields}


def _json_text(field: str, value: str) -> bytes:
    return json_graph(_node(FIELD="VALUE")).replace(b'"FIELD": "VALUE"', f'"{field}": {value}'.encode())


def _groups(groups: object) -> bytes:
    return json_graph(_node(collective={"kind": "all_reduce", "groups": groups}), num_ranks=2)


def _loop(**fields: object) -> bytes:
    return json_graph(_node(region=0), regions=[{"kind": "loop_body", **fields}])


def many_devices(replicas: int, partitions: int) -> bytes:
    """A program that says it runs on that many devices."""
    stated = f"mhlo.num_replicas = {replicas} : i32, mhlo.num_partitions = {partitions} : i32"
    return _mlir("", attributes=f"attributes {{{stated}}}")


def _doubling_hlo() -> bytes:
    body = "  a = f32[4] parameter(0)\n  b = f32[4] {0}\n  ROOT c = f32[4] {1}\n"
    leaf = "f0 {\n" + body.format("add(a, a)", "add(b, a)") + "}\n\n"
    calls = "".join(
        f"f{i} {{\n{body.format(*(f'call({x}), to_apply=f{i - 1}' for x in 'ab'))}}}\n\n"
        for i in range(1, 61)
    )
    return _hlo("ROOT b = f32[4] call(a), to_apply=f60", before=leaf + calls)


def _doubling_mlir() -> bytes:
    kind = "(tensor<f32>) -> tensor<f32>"
    calls = "".join(
        f"func.func private @f{i}(%a: tensor<f32>) -> tensor<f32> {{\n%0 = call @f{i - 1}(%a) : {kind}\n"
        f"%1 = call @f{i - 1}(%0) : {kind}\nreturn %1 : tensor<f32>\n}}\n"
        for i in range(1, 61)
    )
    leaf = "func.func private @f0(%a: tensor<f32>) -> tensor<f32> {\n%0 = stablehlo.abs %a : tensor<f32>\n"
    program = _mlir(f"%0 = call @f60(%a) : {kind}", "%0").decode().removesuffix("}\n")
    return f"{program}{leaf}return %0 : tensor<f32>\n}}\n{calls}}}\n".encode()


JUNK: dict[str, bytes] = {
    "nul": b"\0",
    "letter": b"a",
    "brace": b"{",
    "newline": b"\n",
    "half gzip magic": b"\x1f",
    "high byte": b"\x80",
    "blanks": b" \n\t" * 10,
    "zeros": bytes(4096),
    "random bytes": _RANDOM.randbytes(5000),
    "much random": _RANDOM.randbytes(300_000),
    "prose": b"the quick brown fox\n" * 50,
    "random text": bytes(_RANDOM.choices(b"abcxyz \n{}()[]%=\"'#@!,.0123456789", k=4000)),
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + _RANDOM.randbytes(500),
    "ZIP": b"PK\x03\x04\x14\0\0\0\x08\0" + _RANDOM.randbytes(500),
    "ELF": b"\x7fELF\x02\x01\x01" + bytes(9) + _RANDOM.randbytes(500),
    "pickle": b"\x80\x04\x95" + _RANDOM.randbytes(100),
    "HTML": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "UTF-16 MLIR": "module { func.func @main() { return } }\n".encode("utf-16"),
    "UTF-16 JSON": '{"schema": "hespas.op-graph/1", "nodes": []}'.encode("utf-16"),
    "UTF-16 HLO": "HloModule m\nENTRY e { ROOT p = f32[] parameter(0) }".encode("utf-16"),
    "other JSON": b'{"name": "step", "layers": [1, 2, 3]}',
    "bytecode magic": b"ML\xefR",
    "bytecode head": b"ML\xefR" + _RANDOM.randbytes(500),
    "VHLO head": b"ML\xefR\x06StableHLO_v1.0.0\0" + _RANDOM.randbytes(100),
    "export head": _RANDOM.randbytes(60) + b"\x10\0\0\0ML\xefR" + _RANDOM.randbytes(100),
    "Arrow magic": b"ARROW1",
    "Arrow ends": b"ARROW1\0\0" + _RANDOM.randbytes(400) + b"ARROW1",
    "Arrow footer": b"ARROW1\0\0hespas.op-graph-arrow/1" + _RANDOM.randbytes(400) + b"\x50\0\0\0ARROW1",
    "HLO proto head": b"\x0a\x01m\x12\x01e\x1a\x10\x0a\x01e" + _RANDOM.randbytes(13),
    "HLO proto empty": b"\x0a\x01m\x12\x01e\x1a\x03\x0a\x01e",
    "HLO word": b"HloModule",
    "gzip of nothing": gzip.compress(b"", mtime=0),
    "gzip magic": b"\x1f\x8b",
    "gzip head": b"\x1f\x8b\x08\0\0\0\0\0\0\xff",
    "gzip of random": gzip.compress(_RANDOM.randbytes(3000), mtime=0),
    "gzip damaged": b"\x1f\x8b" + _RANDOM.randbytes(500),
    "gzip twice": gzip.compress(gzip.compress(b"module {}", mtime=0), mtime=0),
    "gzip and more": gzip.compress(_mlir(""), mtime=0) + b"junk",
    "gzip checksum": gzip.compress(_mlir(""), mtime=0)[:-8] + bytes(8),
}

JSON: dict[str, bytes] = {
    "cycle of two": json_graph(_node(deps=[1]), _node(id=1, deps=[0])),
    "cycle by control": json_graph(_node(control_deps=[1]), _node(id=1, deps=[0])),
    "waits for itself": json_graph(_node(deps=[0])),
    "control of itself": json_graph(_node(control_deps=[0])),
    "long ring": json_chain(5000, ring=True),
    "duplicate id": json_graph(_node(id=5), _node(id=5)),
    "dangling dependency": json_graph(_node(deps=[7])),
    "dangling control": json_graph(_node(control_deps=[99])),
    "negative dependency": json_graph(_node(deps=[-1])),
    "fractional dependency": json_graph(_node(deps=[0.5])),
    "huge id": json_graph(_node(id=2**64)),
    "huge dependency": json_graph(_node(deps=[2**70])),
    "negative id": json_graph(_node(id=-1)),
    "NaN": _json_text("flops", "NaN"),
    "Infinity": _json_text("flops", "Infinity"),
    "minus Infinity": _json_text("flops", "-Infinity"),
    "1e999": _json_text("flops", "1e999"),
    "integer of 400 digits": _json_text("flops", "9" * 400),
    "hexadecimal": _json_text("flops", "0x10"),
    "boolean cost": _json_text("flops", "true"),
    "text for a cost": _json_text("flops", '"12"'),
    "negative FLOPs": _json_text("flops", "-5"),
    "negative bytes": _json_text("bytes_read", "-5"),
    "negative time": _json_text("duration_ns", "-5"),
    "minus infinite time": _json_text("duration_ns", '"-inf"'),
    "huge stream": _json_text("stream", str(2**40)),
    "no such region": json_graph(_node(region=5)),
    "unknown kind": json_graph(_node(kind="bogus")),
    "unknown field": json_graph(_node(foo=1)),
    "unclosed type": json_graph(_node(operands=["f32[1,2"])),
    "huge extent": json_graph(_node(operands=[f"f32[{10**30}]"])),
    "type of a megabyte": json_graph(_node(operands=["x" * 1_000_000])),
    "rank twice in a group": _groups([[0, 0]]),
    "rank in two groups": _groups([[0, 1], [1]]),
    "rank beyond the job": _groups([[0, 2**31 - 1]]),
    "iota that does not fit": _groups("[2,4]<=[9]"),
    "iota too long to list": _groups("[1000000000,2]<=[2000000000]"),
    "target twice": json_graph(_node(p2p={"pairs": [[0, 1], [2, 1]]}), num_ranks=3),
    "no rank": json_graph(_node(), num_ranks=0),
    "billions of ranks": json_graph(_node(), num_ranks=2**31 - 1),
    "infinite loop": _loop(trips="inf"),
    "negative trips": _loop(trips=-3),
    "region in itself": _loop(parent=0),
    "no nodes": b'{"schema": "hespas.op-graph/1"}',
    "no classes": b'{"schema": "hespas.op-graph/1", "rank_classes": []}',
    "field beside classes": b'{"rank_classes": [{"nodes": []}], "types": ["f32[1]"]}',
    "node is a number": json_graph(1),
    "node without op": json_graph({"id": 0, "deps": []}),
    "nodes are an object": b'{"schema": "hespas.op-graph/1", "nodes": {}}',
    "invalid base64": json_graph(_node(extra=[{"key": "a", "value": "!!!"}])),
    "invalid UTF-8": json_graph(_node(name="NAME")).replace(b"NAME", b"\xff\xfe"),
    "raw NUL": json_graph(_node(name="NAME")).replace(b"NAME", b"a\0b"),
    "lone surrogate": json_graph(_node(name="NAME")).replace(b"NAME", rb"\ud800"),
    "two documents": json_graph(_node()) * 2,
    "trailing comma": b'{"schema": "hespas.op-graph/1", "nodes": [],}',
    "comment": b"// graph\n" + json_graph(_node()),
}

STABLEHLO: dict[str, bytes] = {
    "cycle": _mlir("%0 = stablehlo.add %1, %a : tensor<f32>\n%1 = stablehlo.add %0, %a : tensor<f32>", "%0"),
    "waits for itself": _mlir("%0 = stablehlo.add %0, %a : tensor<f32>"),
    "duplicate name": _mlir("%0 = stablehlo.abs %a : tensor<f32>\n%0 = stablehlo.abs %a : tensor<f32>"),
    "dangling name": _mlir("%0 = stablehlo.add %9, %a : tensor<f32>"),
    "duplicate function": b"module { func.func @main() { return }\n func.func @main() { return } }",
    "recursion": b"module { func.func @main() { func.call @main() : () -> ()\n return } }",
    "no such function": b"module { func.func @main() { func.call @zz() : () -> ()\n return } }",
    "no function": b"module {}",
    "only a comment": b"// made by hand\n",
    "no main": b"module { func.func @a() { return }\n func.func @b() { return } }",
    "operation of a megabyte": _mlir("x" * 1_000_000),
    "shapes that differ": _mlir('%0 = "stablehlo.add"(%a, %a) : (tensor<f32>, tensor<f32>) -> tensor<4xf32>'),
    "negative extent": b"module { func.func @main(%a: tensor<-5xf32>) { return } }",
    "huge extent": b"module { func.func @main(%a: tensor<99999999999999999999xf32>) { return } }",
    "invalid UTF-8": _mlir("// \xff").replace("\xff".encode(), b"\xff\xfe"),
    "escape sequence": _mlir("\x1b]0;title\x07"),
    "no devices": _mlir("", attributes="attributes {mhlo.num_replicas = 0 : i32}"),
    "source twice": _mlir(
        '%0 = "stablehlo.collective_permute"(%a) {source_target_pairs = dense<[[0, 1], [0, 2]]> : '
        "tensor<2x2xi64>} : (tensor<f32>) -> tensor<f32>"
    ),
    "source far away": _mlir(
        '%0 = "stablehlo.collective_permute"(%a) {source_target_pairs = '
        "dense<[[0, 1], [4611686018427387904, 2]]> : tensor<2x2xi64>} : (tensor<f32>) -> tensor<f32>"
    ),
    "quantised type cut off": b"module {\n func.func @main(%a: tensor<4x!quant.uni",
}

_ALL_REDUCE = "ROOT b = f32[4] all-reduce(a), to_apply=f, replica_groups="
_SUM = "f {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT z = f32[] add(x, y)\n}\n\n"
_MATRIX = "m = f32[4,4] parameter(1)\n  ROOT b = f32[4,4] "

HLO: dict[str, bytes] = {
    "cycle": _hlo("b = f32[4] add(c, a)\n  ROOT c = f32[4] add(b, a)"),
    "waits for itself": _hlo("ROOT b = f32[4] add(b, a)"),
    "duplicate name": _hlo("a = f32[4] add(a, a)\n  ROOT b = f32[4] add(a, a)"),
    "dangling name": _hlo("ROOT b = f32[4] add(zz, a)"),
    "duplicate computation": _hlo("ROOT b = f32[4] add(a, a)", before=_SUM * 2),
    "two entries": _hlo("ROOT b = f32[4] add(a, a)", before="ENTRY " + _SUM),
    "no entry": b"HloModule m, entry_computation_layout={()->f32[]}\n\n" + _SUM.encode(),
    "empty entry": b"HloModule m\n\nENTRY e {\n}\n",
    "only a header": b"HloModule m\n",
    "recursion": _hlo(
        "ROOT b = f32[4] call(a), to_apply=g",
        before="g {\n  a = f32[4] parameter(0)\n  ROOT b = f32[4] call(a), to_apply=g\n}\n\n",
    ),
    "no such computation": _hlo("ROOT b = f32[4] call(a), to_apply=zz"),
    "no such body": _hlo("ROOT b = f32[4] while(a), condition=yy, body=zz"),
    "negative extent": _hlo("ROOT b = f32[-4] abs(a)"),
    "huge extent": _hlo("ROOT b = f32[99999999999999999999999] abs(a)"),
    "no such dimension": _hlo(_MATRIX + "dot(m, m), lhs_contracting_dims={9}, rhs_contracting_dims={0}"),
    "dimension is no number": _hlo(_MATRIX + "dot(m, m), lhs_contracting_dims={x}"),
    "convolution labels": _hlo(_MATRIX + "convolution(m, m), dim_labels=zz_zz->zz"),
    "no such element": _hlo("t = (f32[4]) tuple(a)\n  ROOT b = f32[4] get-tuple-element(t), index=7"),
    "huge parameter": _hlo("ROOT b = f32[4] parameter(99999999999999999999)"),
    "groups that overlap": _hlo(_ALL_REDUCE + "{{0,0},{1,99}}", before=_SUM),
    "iota beyond the job": _hlo(_ALL_REDUCE + "[1000000000,2]<=[2000000000]", ", replica_count=2", _SUM),
    "negative rank": _hlo("ROOT b = f32[4] collective-permute(a), source_target_pairs={{0,-1}}"),
    "no devices": _hlo("ROOT b = f32[4] add(a, a)", ", replica_count=-2"),
    "unclosed text": _hlo('ROOT b = f32[4] add(a, a), metadata={op_name="x'),
    "invalid UTF-8": _hlo("// \xff\n  ROOT b = f32[4] add(a, a)").replace("\xff".encode(), b"\xff\xfe"),
    "NUL": _hlo("ROOT b = f32[4] \0add(a, a)"),
    "escape sequence": _hlo("ROOT \x1b]0;title\x07 = f32[4] add(a, a)"),
}


def _attribute(name: str, field: int, value: int) -> bytes:
    return _bytes(10, _bytes(1, name.encode()) + _number(field, value))


CHAKRA: dict[str, bytes] = {
    "cycle of two": et_file(et_node(0, [1]), et_node(1, [0])),
    "cycle by control": et_file(et_node(0, [], [1]), et_node(1, [0])),
    "waits for itself": et_file(et_node(3, [3])),
    "control of itself": et_file(et_node(3, [], [3])),
    "long ring": et_chain(5000, ring=True),
    "duplicate id": et_file(et_node(1), et_node(1)),
    "dangling dependency": et_file(et_node(1, [9])),
    "dangling control": et_file(et_node(1, [], [9])),
    "unknown node type": et_file(et_node(1, kind=99)),
    "attribute twice": et_file(et_node(1, rest=ON_DEVICE)),
    "attribute of a wrong type": et_file(
        et_node(1, rest=_bytes(10, _bytes(1, b"num_ops") + _bytes(29, b"x")))
    ),
    "no such group": et_file(et_node(1, kind=7, rest=_bytes(10, _bytes(1, b"pg_name") + _bytes(29, b"5")))),
    "text that is not UTF-8": et_file(_number(1, 1) + _bytes(2, b"\xff\xfe") + _number(3, 4)),
    "varint of eleven bytes": et_file(b"\x08" + b"\xff" * 10 + b"\x01"),
    "wire type 7": et_file(et_node(1, rest=b"\x0f\x01")),
    "field number 0": et_file(et_node(1, rest=b"\0\1")),
    "field of 4 GiB": et_file(et_node(1, rest=b"\x12\xff\xff\xff\xff\x0f")),
    "field of 16 EiB": et_file(et_node(1, rest=b"\x12" + b"\xff" * 9 + b"\x01")),
    "dependencies cut off": et_file(_number(1, 1) + _bytes(2, b"n") + _number(3, 4) + _bytes(5, b"\x80\x80")),
    "frame of 2 GiB": et_file() + b"\xff\xff\xff\xff\x07",
    "frame of 16 EiB": et_file() + b"\xff" * 9 + b"\x01",
    "frame length cut off": et_file(et_node(1)) + b"\xff\xff",
    "zero padding": et_file(et_node(1)) + bytes(100_000),
    "open groups": et_file(et_node(1, rest=varint(50 << 3 | 3) * 5000)),
    "no node": et_file(),
    "no metadata": _framed(et_node(1)),
    "broken tensors": et_file(et_node(1, rest=_bytes(8, b"\xff\xff"))),
}

DEEP: dict[str, bytes] = {
    "regions.mlir": _mlir('"stablehlo.case"(%i) ({\n' * _DEEP + "}) : (tensor<i32>) -> ()\n" * _DEEP),
    "modules.mlir": b"module {\n" * _DEEP,
    "types.mlir": b"module { func.func @main(%a: " + b"tuple<" * _DEEP + b"f32" + b">" * _DEEP + b") {} }",
    "attributes.mlir": b"module attributes {a.b = " + b"[" * _DEEP + b"]" * _DEEP + b"} {}",
    "literal.mlir": _mlir(
        "%0 = stablehlo.constant dense<" + "[" * _DEEP + "1" + "]" * _DEEP + "> : tensor<1xi8>"
    ),
    "locations.mlir": _mlir("").replace(b"%a : ", b"%a loc(" + b"callsite(" * _DEEP),
    "tuples.hlo": _hlo("ROOT b = " + "(" * _DEEP + "f32[4]" + ")" * _DEEP + " tuple(a)"),
    "open.hlo": _hlo("ROOT b = " + "(" * _DEEP),
    "computations.hlo": b"HloModule m\n" + b"e {\n" * _DEEP,
    "operands.hlo": _hlo("ROOT b = f32[4] add(" + "(" * _DEEP + ")" * _DEEP + ")"),
    "arrays.json": b'{"schema": "hespas.op-graph/1", "nodes": ' + b"[" * _DEEP,
    "closed arrays.json": b'{"schema": "hespas.op-graph/1", "nodes": ' + b"[" * _DEEP + b"]" * _DEEP + b"}",
    "objects.json": b'{"schema": "hespas.op-graph/1", "nodes": '
    + b'{"a":' * _DEEP
    + b"1"
    + b"}" * _DEEP
    + b"}",
    "in a node.json": json_graph(_node(deps="DEPS")).replace(b'"DEPS"', b"[" * _DEEP + b"]" * _DEEP),
}

_CRLF_JSON = json.dumps(json.loads(json_graph(_node())), indent=1).encode()

DOUBLING = {"a.hlo": _doubling_hlo(), "a.mlir": _doubling_mlir()}
"""2**60 operations once calls are written out. Sound programs, too large for anyone."""

ACCEPTED: dict[str, bytes] = {
    "lines.mlir": _mlir("%0 = stablehlo.abs %a : tensor<f32>").replace(b"\n", b"\r\n"),
    "lines.hlo": _hlo("ROOT b = f32[4] add(a, a)").replace(b"\n", b"\r\n"),
    "lines.json": _CRLF_JSON.replace(b"\n", b"\r\n"),
    "unknown operation.mlir": _mlir('"foo.bar"() : () -> ()'),
    "order.json": json_graph(_node(deps=[1]), _node(id=1)),
    "nothing.json": json_graph(),
    "name.json": json_graph(_node(name="a\0\x1b[31mb")),
    "metadata.et": et_file(et_node(1), metadata=_bytes(1, b"\x1b[31m9")),
    "unknown fields.et": et_file(et_node(1, rest=_number(100, 5) + _bytes(2000, b"abc"))),
    "long name.et": et_file(_number(1, 1) + _bytes(2, b"n" * 3_000_000) + _number(3, 4) + ON_DEVICE),
    "many attributes.et": et_file(
        et_node(1, rest=b"".join(_attribute(f"a{i}", 9, i) for i in range(20_000)))
    ),
    "extents.mlir": b"module { func.func @main(%a: tensor<" + b"1x" * 3000 + b"f32>) { return } }",
}
"""Unusual, yet sound: line ends of Windows, any order, control characters, large fields."""
