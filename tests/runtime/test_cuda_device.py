"""The CUDA device against a recording fake of the driver: what is loaded, set, encoded and launched."""

from __future__ import annotations

import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real
from torch.utils._python_dispatch import TorchDispatchMode

from cute_mla.runtime import driver, libcuda
from cute_mla.runtime.arguments import ArgumentBlock
from cute_mla.runtime.cuda_device import CudaDevice
from cute_mla.runtime.current import cpu_tensors_on
from cute_mla.runtime.errors import ArtifactError, DeviceError
from cute_mla.runtime.launch import BufferRef, CallSteps, Step
from cute_mla.spec import dense_decode
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.arch import SM90, SM100, Arch
from cute_mla.spec.split_plan import NO_LIMIT, SplitPlanArguments
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.runtime.decode_arguments import COUNTS, decode_arguments
from tests.runtime.fake_artifacts import dense_entries, fake_cubin, write_artifacts
from tests.runtime.fake_driver import FakeDriver, scalar
from tests.support.params import float32s, int32s, int64s, pointers, tensor_maps
from tests.support.right_calls import given_call

CLUSTER = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION.value
PDL = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.value
SMEM_LIMIT = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
LARGE_CLUSTER = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


class Refused(TorchDispatchMode):
    """Fails at every operation of torch: allocations, copies and reads among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the path of a call")


KV_MAP = TensorMap("bf16", 0x7000_0000, (576, 1, 64, 100), (1152, 1152, 73_728), (64, 1, 64, 1), Swizzle.B128)


def plan_args(batch: int = 3) -> tuple[Any, ...]:
    """Return arguments of split_plan."""
    lengths, plan, splits = torch.zeros(batch, dtype=torch.int32), torch.zeros(132, 8, dtype=torch.int32), torch.zeros(batch + 1)
    return SplitPlanArguments(lengths, None, plan, splits, None, None, batch, 132, NO_LIMIT, 0, 0, 0, 0, 1, NO_LIMIT, 0, 0)


@pytest.mark.parametrize(
    ("capability", "sm_count", "arch"), [((9, 0), 114, SM90), ((10, 0), 148, SM100), ((10, 3), 160, SM100)], ids=["H100", "B200", "B300"]
)
def test_device_reports_arch_and_sm_count(fake: FakeDriver, capability: tuple[int, int], sm_count: int, arch: Arch) -> None:
    fake.capability, fake.sm_count = capability, sm_count
    device = CudaDevice(0)
    assert device.arch is arch
    assert device.sm_count == sm_count


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100")])
def test_first_launch_loads_checks_and_prepares_the_kernel_once(
    fake: FakeDriver, artifacts: Path, capability: tuple[int, int], arch: str
) -> None:
    """The devices of a family load one cubin."""
    fake.capability = capability
    device = CudaDevice(0)
    kernel = device.kernel("dense_decode", "bf16_cluster2")
    assert kernel.name == f"dense_decode_{arch}_bf16_cluster2"
    for _ in range(2):
        device.launch(kernel, (2, 1, 66), decode_arguments(KV_MAP))
    assert fake.called("cuLibraryLoadData") == [((artifacts / kernel.cubin).read_bytes(), [], [], 0, [], [], 0)]
    assert fake.called("cuLibraryGetKernel") == [("library 1", kernel.entry.encode())]
    assert fake.called("cuKernelSetAttribute") == [(SMEM_LIMIT, 230_000, kernel.entry, 0)]
    assert fake.called("cuFuncLoad") == [(f"function of {kernel.entry}",)]


def test_clusters_beyond_the_portable_size_are_allowed_explicitly(fake: FakeDriver, artifacts: Path) -> None:
    wide = [replace(kernel, cluster=(16, 1, 1)) for kernel in dense_entries(fake_cubin())]
    write_artifacts(artifacts, entries=wide)
    device = CudaDevice(0)
    kernel = device.kernel("split_plan", "i32")
    device.launch(kernel, (16, 1, 1), plan_args())
    assert (LARGE_CLUSTER, 1, kernel.entry, 0) in fake.called("cuKernelSetAttribute")


def test_loading_is_allowed_while_a_stream_is_captured(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    device.launch(device.kernel("split_plan", "i32"), (1, 1, 1), plan_args())
    names = [name for name, _ in fake.calls]
    exchanges = [i for i, name in enumerate(names) if name == "cuThreadExchangeStreamCaptureMode"]
    assert len(exchanges) == 2
    assert exchanges[0] < names.index("cuLibraryLoadData") < names.index("cuFuncLoad") < exchanges[1] < names.index("cuLaunchKernelEx")
    modes = real.CUstreamCaptureMode
    assert [args[0] for args in fake.called("cuThreadExchangeStreamCaptureMode")] == [
        modes.CU_STREAM_CAPTURE_MODE_RELAXED,
        modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
    ]


def test_launch_configuration(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    decode = device.kernel("dense_decode", "bf16_cluster2")
    device.launch(decode, (2, 3, 22), decode_arguments(KV_MAP), pdl=True)
    device.launch(decode, (2, 1, 66), decode_arguments(KV_MAP), stream=123)
    device.launch(device.kernel("split_plan", "i32"), (1, 1, 1), plan_args(), stream=0)
    first, second, third = fake.launches
    assert (first.grid, first.block, first.smem_bytes, first.stream) == ((2, 3, 22), (384, 1, 1), 230_000, 77)
    assert first.attributes == {CLUSTER: struct.pack("<3I", 2, 1, 1), PDL: struct.pack("<i8x", 1)}
    assert (second.grid, second.stream) == ((2, 1, 66), 123)
    assert second.attributes.keys() == {CLUSTER}
    assert (third.kernel, third.block, third.stream, third.attributes) == ("split_plan_sm90_i32_0", (1024, 1, 1), 0, {})


def test_argument_block_holds_every_argument_in_order(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    args = decode_arguments(KV_MAP)
    device.launch(device.kernel("dense_decode", "fp16_cluster1"), (1, 1, 1), args)
    (launch,) = fake.launches
    assert list(launch.arguments) == [param.name for param in dense_decode.PARAMS]
    assert launch.arguments["kv_map"][:124] == struct.pack("<Q", KV_MAP.address) + b"\xee" * 116
    assert scalar(launch.arguments["q"], "Q") == args[2].data_ptr()
    assert scalar(launch.arguments["lse"], "Q") == args[11].data_ptr()
    assert scalar(launch.arguments["lse_accum"], "Q") == args[13].tensor.data_ptr() + 4096
    assert scalar(launch.arguments["q_stride_batch"], "q") == 2**33
    assert scalar(launch.arguments["table_stride"], "q") == 2**33 + 9
    assert scalar(launch.arguments["scale_log2"], "f") == 0.5
    assert scalar(launch.arguments["empty_lse"], "f") == float("inf")
    assert [scalar(launch.arguments[name], "i") for name in ("s_q", "h_q", "steady_values")] == [0, 1, COUNTS[ParamKind.INT32] - 1]


def test_argument_block_aligns_every_argument() -> None:
    import ctypes

    params = (*tensor_maps("m", "n"), *pointers("p", "o"), *int32s("a"), *int64s("b"), *float32s("c"), *int32s("d"))
    block = ArgumentBlock(params)
    table = (ctypes.c_void_p * len(params)).from_address(block.table_address)
    for pointer, alignment in zip(table, (64, 64, 8, 8, 4, 8, 4, 4), strict=True):
        assert pointer is not None
        assert pointer % alignment == 0


def test_argument_block_refuses_parameters_in_another_order() -> None:
    with pytest.raises(ValueError, match="parameters are int32, pointer; supported: tensor maps, pointers, scalars"):
        ArgumentBlock((*int32s("a"), *pointers("p")))


def test_argument_block_refuses_a_wrong_number_of_arguments() -> None:
    with pytest.raises(struct.error):
        ArgumentBlock(int32s("a", "b")).fill((1,))


def test_tensor_map_is_encoded_once_with_all_its_fields(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    for _ in range(2):
        device.launch(device.kernel("dense_decode", "bf16_cluster1"), (1, 1, 1), decode_arguments(KV_MAP))
    (encoded,) = fake.maps
    assert encoded.data_type == real.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert (encoded.address, encoded.dims, encoded.strides, encoded.box) == (KV_MAP.address, KV_MAP.dims, KV_MAP.strides, KV_MAP.box)
    assert encoded.element_strides == (1, 1, 1, 1)
    assert encoded.interleave == real.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert encoded.swizzle == real.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert encoded.l2_promotion == real.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert encoded.oob_fill == real.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_tensor_map_is_encoded_into_aligned_memory(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    for address in range(0x1000, 0x1400, 0x10):
        args = decode_arguments(replace(KV_MAP, address=address))
        device.launch(device.kernel("dense_decode", "bf16_cluster1"), (1, 1, 1), args)
    targets = [args[0] for args in fake.called("cuTensorMapEncodeTiled")]
    assert len(targets) == 64
    assert all(target % 64 == 0 for target in targets)


@pytest.mark.parametrize(
    ("version", "pages", "cleared"), [(13010, 1, True), (13020, 1, False), (13010, 2, False)], ids=["old small", "new", "old large"]
)
def test_small_tensor_flag_of_old_drivers(fake: FakeDriver, version: int, pages: int, cleared: bool) -> None:
    fake.version = version
    device = CudaDevice(0)
    small = replace(KV_MAP, dims=(576, 1, 64, pages))
    device.launch(device.kernel("dense_decode", "bf16_cluster1"), (1, 1, 1), decode_arguments(small))
    word = int.from_bytes(fake.launches[0].arguments["kv_map"][8:16], "little")
    assert word == 0xEEEE_EEEE_EEEE_EEEE & ~(1 << 21 if cleared else 0)


@pytest.mark.parametrize("current", [None, 1], ids=["no context", "another device"])
def test_launch_in_a_thread_of_another_context(fake: FakeDriver, current: int | None) -> None:
    device = CudaDevice(0)
    kernel = device.kernel("split_plan", "i32")
    device.launch(kernel, (1, 1, 1), plan_args())
    assert fake.called("cuCtxPushCurrent") == []
    fake.current_device = current
    device.launch(kernel, (1, 1, 1), plan_args())
    names = [name for name, _ in fake.calls][-3:]
    assert names == ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    assert fake.called("cuCtxPushCurrent") == [("primary context of 0",)]


def test_a_decode_call_asks_the_driver_for_two_launches_and_nothing_else(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    with cpu_tensors_on(device):
        first, again = (given_call("dense", batch=4, h_q=128) for _ in range(2))  # both live, so that the caches have two addresses
        first.run()  # loads the kernels
        fake.calls.clear()
        with Refused():
            again.run()
    assert [name for name, _ in fake.calls] == ["cuTensorMapEncodeTiled"] * 2 + ["cuCtxGetDevice", "cuLaunchKernelEx", "cuLaunchKernelEx"]
    decode, combine = fake.launches[-2:]
    assert scalar(decode.arguments["q"], "Q") == again["q"].data_ptr()
    assert decode.arguments["kv_map"][:8] == struct.pack("<Q", again["k_cache"].data_ptr())
    assert scalar(decode.arguments["lse_accum"], "Q") == scalar(combine.arguments["lse_accum"], "Q")
    assert scalar(decode.arguments["lse_accum"], "Q") > scalar(decode.arguments["out_accum"], "Q") == again["workspace"].data_ptr()
    assert scalar(combine.arguments["lengths"], "Q") == again["cache_seqlens"].data_ptr()
    assert (scalar(combine.arguments["extra_lengths"], "Q"), scalar(decode.arguments["descale_k"], "Q")) == (0, 0)
    assert scalar(combine.arguments["out"], "Q") == scalar(decode.arguments["out"], "Q") == again["out"].data_ptr()


def test_threads_do_not_share_prepared_launches(fake: FakeDriver) -> None:
    inside, release, tables = threading.Event(), threading.Event(), list[int]()

    def launch(config: Any, kernel: str, table: int, extra: int) -> tuple[()]:
        tables.append(table)
        if len(tables) == 1:
            inside.set()
            assert release.wait(10)
        return ()

    fake._cuLaunchKernelEx = launch  # type: ignore[method-assign]
    device = CudaDevice(0)
    pointers = (BufferRef(0), None, BufferRef(1), BufferRef(2), None, None)
    scalars = tuple(argument for argument in plan_args() if isinstance(argument, int))
    step = Step(device.kernel("split_plan", "i32"), (1, 1, 1), (), pointers, scalars, pdl=False)
    launches = device.prepare(CallSteps((step,), 3, ()))
    tensors = [torch.zeros(1)] * 3
    first = threading.Thread(target=launches.start, args=(tensors, [1, 2, 3]))
    first.start()
    assert inside.wait(10)
    launches.start(tensors, [1, 2, 3])
    release.set()
    first.join()
    launches.start(tensors, [1, 2, 3])
    assert tables[1] != tables[0], "arguments in use were written again"
    assert tables[2] in tables[:2], "arguments were not given back"


def test_threads_do_not_share_argument_blocks(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(0)
    kernel = device.kernel("split_plan", "i32")
    inside, release = threading.Event(), threading.Event()
    tables: list[int] = []

    def launch(config: Any, handle: Any, table: int) -> None:
        tables.append(table)
        if len(tables) == 1:
            inside.set()
            assert release.wait(10)

    monkeypatch.setattr(driver, "launch", launch)
    first = threading.Thread(target=device.launch, args=(kernel, (1, 1, 1), plan_args()))
    first.start()
    assert inside.wait(10)
    device.launch(kernel, (1, 1, 1), plan_args())
    release.set()
    first.join()
    device.launch(kernel, (1, 1, 1), plan_args())
    assert tables[1] != tables[0], "a block in use was used again"
    assert len(device._kernels[kernel.name].buffers) == 2, "blocks were not given back"


def test_driver_error_names_function_and_code(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    fake.fail["cuLaunchKernelEx"] = 700
    with pytest.raises(DeviceError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)") as caught:
        device.launch(device.kernel("split_plan", "i32"), (1, 1, 1), plan_args())
    assert (caught.value.name, caught.value.code) == ("CUDA_ERROR_ILLEGAL_ADDRESS", 700)


def test_tensor_map_error_shows_the_map(fake: FakeDriver) -> None:
    device = CudaDevice(0)
    fake.fail["cuTensorMapEncodeTiled"] = 1
    with pytest.raises(DeviceError, match=r"BFLOAT16, 0x70000000, dims \(576, 1, 64, 100\).*CUDA_ERROR_INVALID_VALUE \(1\)"):
        device.launch(device.kernel("dense_decode", "bf16_cluster1"), (1, 1, 1), decode_arguments(KV_MAP))


def test_driver_without_tensor_maps(fake: FakeDriver) -> None:
    fake.proc_address = 0
    device = CudaDevice(0)
    with pytest.raises(DeviceError, match="has no tensor maps"):
        device.launch(device.kernel("dense_decode", "bf16_cluster1"), (1, 1, 1), decode_arguments(KV_MAP))


def test_no_driver(monkeypatch: pytest.MonkeyPatch, artifacts: Path) -> None:
    class NoDriver:
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("libcuda.so.1 cannot be found")

    monkeypatch.setattr(driver, "_bindings", NoDriver)
    with pytest.raises(DeviceError, match=r"no usable NVIDIA driver: cuInit cannot be called: libcuda.so.1 cannot be found"):
        CudaDevice(0)


def test_no_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    monkeypatch.setattr(libcuda, "_LIBRARY", "libnowhere.so.1")
    driver._bindings.cache_clear()
    libcuda._function.cache_clear()
    with pytest.raises(DeviceError, match=r"no usable NVIDIA driver: cuInit cannot be called: libnowhere\.so\.1"):
        driver.init()
    driver._bindings.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (10, 1), (11, 0), (12, 2)])
def test_another_architecture(fake: FakeDriver, capability: tuple[int, int]) -> None:
    fake.capability = capability
    found = f"{capability[0]}\\.{capability[1]}"
    supported = r"9\.0 \(sm90\), 10\.0 or 10\.3 \(sm100\), 12\.0 or 12\.1 \(sm120\)"
    with pytest.raises(DeviceError, match=rf"cuda:0 \(Fake Board\) has compute capability {found}; supported: {supported}"):
        CudaDevice(0)


def test_old_driver_is_refused_with_both_versions(fake: FakeDriver) -> None:
    fake.version = 12080
    device = CudaDevice(0)
    message = r"compiled with CUDA 13\.4 and needs a driver for CUDA 13\.0 \(version 580\) or newer; the installed driver is for CUDA 12\.8"
    with pytest.raises(DeviceError, match=message):
        device.launch(device.kernel("split_plan", "i32"), (1, 1, 1), plan_args())
    assert fake.called("cuLibraryLoadData") == []


def test_old_driver_takes_cubins_of_its_cuda(fake: FakeDriver, artifacts: Path) -> None:
    write_artifacts(artifacts, fake_cubin(abi=7, toolkit=""))
    fake.version = 12080
    device = CudaDevice(0)
    device.launch(device.kernel("split_plan", "i32"), (1, 1, 1), plan_args())
    assert len(fake.launches) == 1


def test_no_cubin_for_the_arch(fake: FakeDriver, artifacts: Path) -> None:
    write_artifacts(artifacts, entries=dense_entries(fake_cubin())[-1:])
    device = CudaDevice(0)
    with pytest.raises(ArtifactError, match=r"found no kernel combine_sm90_bf16 among the 1 that are built; .*cute-mla build --kernel"):
        device.kernel("combine", "bf16")
