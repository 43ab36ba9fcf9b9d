"""Seeds that no writer of Hespas makes: small files of other tools."""

from __future__ import annotations

import json

__all__ = ["ASTRA_TEXTS", "CHAKRA_JSONS", "KINETO"]

KINETO = b"""{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU", "numSms": 8}],
"distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2}, "traceEvents": [
{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 1, "ts": 4354796305926.358,
 "dur": 12.5, "args": {"External id": 3,
 "Record function id": 0, "Input Dims": [[4, 8], [8, 2]], "Input type": ["float"]}},
{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 1, "ts": 4354796305927,
 "dur": 1, "args": {"correlation": 5, "cbid": 211}},
{"ph": "X", "cat": "kernel", "name": "gemm<float, 2>", "pid": 0, "tid": 7, "ts": 4354796305940.1,
 "dur": 3.125, "args": {"correlation": 5, "stream": 7, "device": 0, "grid": [1, 2, 3]}},
{"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}}
], "traceName": "t.json"}"""

_LAYERS = b"""a  -1  10 ALLGATHER 100  11 ALLREDUCE 110  12 ALLREDUCE 120  1
b  -1  20 NONE 0         21 ALLTOALL 210   22 ALLREDUCE 220  0
c  -1  30 ALLREDUCE 300  31 NONE 0         32 REDUCESCATTER 320 3
"""
ASTRA_TEXTS = (
    b"DATA\n3\n" + _LAYERS,
    b"MODEL\n3\n" + _LAYERS,
    b"HYBRID_DATA_MODEL\n3\n" + _LAYERS,
    b"HYBRID_TRANSFORMER model_parallel_NPU_group: 2\n3\n" + _LAYERS,
    b"MICRO\n1\nx -1 5 NONE 0 5 NONE 0 5 ALLREDUCE 1048576 5\n",
)
"""Workloads of ASTRA-sim 1.0, one of each family of policies."""

_FEEDER: list[dict[str, object]] = [
    {"Id": 3, "Name": "matmul", "NodeType": 4, "is_cpu_op": False, "runtime": 12, "data_deps": []},
    {"Id": 4, "Name": "sum", "NodeType": 7, "is_cpu_op": False, "runtime": 0.25, "data_deps": [3],
     "comm_type": 0, "comm_size": 4096, "involved_dim": [True, False]},
    {"Id": 5, "Name": "to 1", "NodeType": 5, "data_deps": [4], "ctrlDeps": [3], "comm_src": 0,
     "comm_dst": 1, "comm_tag": 8, "comm_size": 64},
]  # fmt: skip
_JSONIZER = (
    {"version": "0.0.4", "attr": [{"name": "schema", "stringVal": "1.1.0"}]},
    {"id": "1", "name": "gemm", "type": "COMP_NODE", "durationMicros": "17",
     "inputs": {"values": "[1]"}, "attr": [{"name": "num_ops", "int64Val": "8589934592"},
     {"name": "is_cpu_op", "boolVal": False}]},
    {"id": "2", "name": "sum", "type": "COMM_COLL_NODE", "dataDeps": ["1"], "ctrlDeps": ["1"],
     "attr": [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val": "4096"},
              {"name": "involved_dim", "boolList": {"values": [True, False]}}]},
)  # fmt: skip
CHAKRA_JSONS = (
    json.dumps({"workload_graph": _FEEDER}, indent=1).encode(),
    b"".join(json.dumps(document, indent=2).encode() for document in _JSONIZER),
)
"""What Chakra's C++ feeder reads, and what its jsonizer prints: documents one after the other."""
