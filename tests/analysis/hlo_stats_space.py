"""A trace of two GPUs that ran two programs with instructions of the same names, with the HLO of both."""

from __future__ import annotations

from fixtures.make.bindings import hlo_text_to_proto
from fixtures.make.xspace import Event, Line, Plane, Ref, Value, encode_space

__all__ = ["gpu_space"]

_NS = 1_000
_MODULE = """\
HloModule jit_step, is_scheduled=true

%fused (a: f32[256,N]) -> f32[256,N] {{
  %a = f32[256,N]{{1,0}} parameter(0)
  ROOT %tanh.1 = f32[256,N]{{1,0}} tanh(%a)
}}

ENTRY %main (p: f32[256,N]) -> f32[256,N] {{
  %p = f32[256,N]{{1,0}} parameter(0)
  %copy.1 = f32[256,N]{{0,1}} copy(%p)
  %fusion.1 = f32[256,N]{{1,0}} fusion(%copy.1), kind=kLoop, calls=%fused
  ROOT %dot.2 = f32[256,256]{{1,0}} dot(%fusion.1, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
""".replace("(p: f32[256,N]) -> f32[256,N]", "(p: f32[256,N]) -> f32[256,256]")
_PROGRAMS = {1: 512, 2: 1024}
"""Columns of the matrix of each program. XProf numbers a program by the id of its kind of event."""


def _length(size: int) -> bytes:
    found = bytearray()
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


def _module(program: int) -> Event:
    text = _MODULE.format().replace("N]", f"{_PROGRAMS[program]}]")
    proto = hlo_text_to_proto(text)
    facts: dict[str, Value] = {"Hlo Proto": b"\x0a" + _length(len(proto)) + proto, "program_id": program}
    return Event(f"jit_step({program})", 0, 0, common=facts)


def _kernel(kernel: str, op: str, program: int, at_ns: int, duration_ns: int) -> Event:
    stats: dict[str, Value] = {
        "hlo_op": Ref(op),
        "hlo_module": Ref("jit_step"),
        "program_id": program,
        "correlation_id": at_ns,
        "kernel_details": Ref("regs:32 static_shared:0 dynamic_shared:0 grid:8,1,1 block:128,1,1"),
    }
    return Event(kernel, at_ns * _NS, duration_ns * _NS, stats)


def _streams(gpu: int) -> list[Line]:
    """Three runs of the first program and two of the second; a product is two kernels, on two streams."""
    first: list[Event] = []
    second: list[Event] = []
    for run, program in enumerate((1, 2, 1, 2, 1)):
        at, more = 100_000 * run, 100 * program + gpu
        first.append(_kernel("copy_kernel", "copy.1", program, at + 1_000, 2_000 + more))
        first.append(_kernel("loop_fusion", "fusion.1", program, at + 11_000, 4_000 + more))
        first.append(_kernel("gemm", "dot.2", program, at + 21_000, 30_000 + more))
        second.append(_kernel("split_k", "dot.2", program, at + 41_000, 5_000 + more))
    details = Ref("kind_src:device kind_dst:device size:4096 dest:0 async:1")
    facts: dict[str, Value] = {"correlation_id": 5, "memcpy_details": details}
    copies = [Event("MemcpyD2D", 600_000 * _NS, 3_000 * _NS, facts)]
    base_ns = 1_700_000_000_000_040_000
    return [
        Line(7, "Stream #7(Kernel)", base_ns, first),
        Line(8, "Stream #8(Kernel)", base_ns, second),
        Line(9, "Stream #9(MemcpyD2D)", base_ns, copies),
    ]


def gpu_space() -> bytes:
    """Return the trace as an XSpace."""
    stats: dict[str, Value] = {
        "device_vendor": "Nvidia", "gpu_device_name": "NVIDIA H100 80GB HBM3", "core_count": 132,
        "clock_rate": 1_980_000, "memory_bandwidth": 3_352_320_000_000, "compute_cap_major": 9,
    }  # fmt: skip
    planes = [
        Plane(1, "/host:metadata", {}, [], [_module(program) for program in _PROGRAMS]),
        *(Plane(gpu + 2, f"/device:GPU:{gpu}", stats, _streams(gpu)) for gpu in (0, 1)),
    ]
    return encode_space(planes, [], ["worker-0"])
