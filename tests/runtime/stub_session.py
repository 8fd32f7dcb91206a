"""Run by test_stub_driver.py in a process whose libcuda is the stub: launches dense_decode twice and prints what the stub saw.

Its arguments are the compute capability of the device, as in `10 3`, and `ctypes` for a process without cuda-python.
"""

from __future__ import annotations

import ctypes
import json
import sys

from cute_mla.runtime import cuda_device, cuda_launches
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.dense_decode import PARAMS
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.runtime.decode_arguments import COUNTS, decode_arguments


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class Record(ctypes.Structure):
    _fields_ = (
        ("launches", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_uint),
        ("attribute", Attribute * 4),
        ("map_words", ctypes.c_uint64 * 16),
        ("argument", ctypes.c_uint64 * 64),
        ("smem_limit", ctypes.c_int),
        ("library_bytes", ctypes.c_uint64),
        ("encode_calls", ctypes.c_int),
        ("encode_misaligned", ctypes.c_int),
    )


def main() -> None:
    """Print a JSON object."""
    if "ctypes" in sys.argv:
        sys.modules["cuda.bindings.driver"] = None  # type: ignore[assignment]  # as Python marks a module that cannot be imported
    cuda_launches.current_stream = lambda index: 0x5757
    stub = ctypes.CDLL("libcuda.so.1")
    ctypes.c_int.in_dll(stub, "stub_arguments").value = len(PARAMS)
    (ctypes.c_int * 2).in_dll(stub, "stub_capability")[:] = [int(sys.argv[1]), int(sys.argv[2])]
    device = cuda_device.CudaDevice(0)
    kernel = device.kernel("dense_decode", "bf16_cluster2")
    kv_map = TensorMap("bf16", 0x70000000, (576, 1, 64, 100), (1152, 1152, 73728), (64, 1, 64, 1), Swizzle.B128)
    args = decode_arguments(kv_map, first_int64=0)
    maps = COUNTS[ParamKind.TENSOR_MAP]
    floats = maps + COUNTS[ParamKind.POINTER] + COUNTS[ParamKind.INT64]  # the first of them
    int64s = floats - COUNTS[ParamKind.INT64]
    for _ in range(2):
        device.launch(kernel, (2, 1, 66), args, pdl=True)
    record = Record.in_dll(stub, "stub_record")
    seen = {
        "kernel": kernel.name,
        "launches": record.launches,
        "grid": list(record.grid),
        "block": list(record.block),
        "smem": record.smem,
        "smem_limit": record.smem_limit,
        "stream": record.stream,
        "attributes": {a.id: list(a.value[:3]) for a in record.attribute[: record.attributes]},
        "map_words": list(record.map_words),
        "addresses": list(record.argument[maps:int64s]),
        "expected_addresses": [arg.data_ptr() for arg in args[maps:int64s]],
        "int64s": list(record.argument[int64s:floats]),
        "int32s": [word & 0xFFFF_FFFF for word in record.argument[floats + COUNTS[ParamKind.FLOAT32] : len(PARAMS)]],
        "library_bytes": record.library_bytes,
        "encode_calls": record.encode_calls,
        "encode_misaligned": record.encode_misaligned,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
