"""CuTe-DSL programs that are compiled and run on the simulated device."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cutlass import Float32, Int32, cute
from cutlass.base_dsl.compiler import Compiler
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.base_dsl.jit_executor import ExecutionArgs, JitCompiledFunction, JitExecutor
from cutlass.base_dsl.runtime import cuda
from cutlass.cute.runtime import _Tensor, from_dlpack, make_fake_compact_tensor, make_ptr
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
from cutlass.utils import HardwareInfo

from cute_mla.simulator import SimulationError, UnsupportedInstruction, cute_dsl
from cute_mla.simulator.cute_dsl import program
from cute_mla.simulator.cute_dsl.memory import DeviceView

from . import cute_dsl_programs as programs
from .cute_dsl_programs import THREADS, TILE

CTAS = 3


def call(program: Any, *args: Any) -> None:
    program(*args)


def compile_and_call(program: Any, *args: Any) -> None:
    compiled = cute.compile(program, *args)
    compiled(*args)


both_ways = pytest.mark.parametrize("run", [call, compile_and_call])


def vectors(count: int) -> Iterator[torch.Tensor]:
    yield torch.arange(CTAS * THREADS, dtype=torch.float32)
    for _ in range(count - 1):
        yield torch.zeros(CTAS * THREADS)


@both_ways
@pytest.mark.parametrize("code", ["ptx", "sass"])
@pytest.mark.parametrize("gpu_arch", ["sm_90a", "sm_100a"])
def test_a_program_runs_on_host_memory(run: Callable[..., None], code: str, gpu_arch: str) -> None:
    x, y = vectors(2)
    with cute_dsl.simulate(gpu_arch, code=code) as device:
        run(programs.add, from_dlpack(x), from_dlpack(y), Float32(0.5))
    assert torch.equal(y, x + 0.5)
    (launch,) = device.launches
    assert "add_kernel" in launch.kernel
    assert (launch.shape.grid, launch.shape.block, launch.shape.smem_bytes) == ((CTAS, 1, 1), (THREADS, 1, 1), 0)
    assert launch.report.instructions == device.instructions > 0
    assert device.findings == []


@both_ways
@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_tensor_maps_and_barriers(run: Callable[..., None], schedule: str) -> None:
    x, y = torch.randn(CTAS * TILE, TILE), torch.zeros(CTAS * TILE, TILE)
    with cute_dsl.simulate(schedule=schedule, seed=3) as device:
        run(programs.TileCopy(), from_dlpack(x, assumed_align=16), from_dlpack(y))
    assert torch.equal(x, y)
    assert len(device.launches) == 1


def test_a_missing_wait_for_a_copy_is_found() -> None:
    x, y = torch.randn(CTAS * TILE, TILE), torch.zeros(CTAS * TILE, TILE)
    with cute_dsl.simulate(on_finding="collect") as device:
        programs.TileCopy(waits=False)(from_dlpack(x, assumed_align=16), from_dlpack(y))
    assert "missing_wait" in {finding.kind for finding in device.findings}


@both_ways
def test_a_race_is_found_and_names_its_source(run: Callable[..., None]) -> None:
    (x,) = vectors(1)
    expected = x.view(CTAS, 2, 32).flip(1).reshape(-1)
    with cute_dsl.simulate():
        run(programs.Exchange(waits=True), from_dlpack(x))
    assert torch.equal(x, expected)
    with cute_dsl.simulate() as device, pytest.raises(SimulationError, match=r"exchange_kernel.*on grid") as raised:
        run(programs.Exchange(waits=False), from_dlpack(x))
    assert {finding.kind for finding in raised.value.findings} == {"race"}
    assert device.findings == list(raised.value.findings)
    assert all(finding.source is not None and "cute_dsl_programs.py:" in finding.source for finding in device.findings)


def test_findings_of_host_memory_name_the_parameter() -> None:
    x, y = vectors(2)
    with cute_dsl.simulate(), pytest.raises(SimulationError, match="from the start of 'y'"):
        programs.add(from_dlpack(x), from_dlpack(y[:THREADS]), Float32(0))


def test_a_launch_behind_a_finding_does_not_run() -> None:
    x, y, z = vectors(3)
    with cute_dsl.simulate(on_finding="collect") as collecting:
        programs.add_twice(from_dlpack(x), from_dlpack(y), from_dlpack(z))
    assert [launch.shape.dependent for launch in collecting.launches] == [False, True]
    assert {finding.kind for finding in collecting.findings} == {"missing_wait"}  # it reads y without griddepcontrol.wait
    with cute_dsl.simulate() as device, pytest.raises(SimulationError, match="out_of_bounds"):
        programs.add_twice(from_dlpack(x), from_dlpack(y[:THREADS]), from_dlpack(z))
    assert len(device.launches) == 1


def test_memory_behind_pointers_is_added() -> None:
    x, y = vectors(2)
    pointers = [make_ptr(Float32, tensor.data_ptr(), cute.AddressSpace.gmem) for tensor in (x, y)]
    with cute_dsl.simulate() as device:
        with pytest.raises(SimulationError, match="out_of_bounds"):
            programs.add_pointers(*pointers, Int32(x.numel()))
        device.add("x", x)
        device.add("y", y)
        programs.add_pointers(*pointers, Int32(x.numel()))
    assert torch.equal(y, x + 2)
    assert device.launches[-1].shape.cluster == (CTAS, 1, 1)


def test_slices_of_one_tensor_are_one_region() -> None:
    x = torch.arange(2.0 * CTAS * THREADS)
    halves = x.clone().view(-1, 2)
    with cute_dsl.simulate():
        programs.add(from_dlpack(halves[:, 0]), from_dlpack(halves[:, 1]), Float32(0.25))
    assert torch.equal(halves[:, 1], halves[:, 0] + 0.25)


def test_unknown_instructions_are_refused() -> None:
    with cute_dsl.simulate(), pytest.raises(UnsupportedInstruction, match="brkpt"):
        programs.unknown()


def test_functions_of_the_driver_without_a_stand_in_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(program._FUNCTIONS, "_cuTensorMapEncodeTiled")
    x = torch.randn(TILE, TILE)
    with cute_dsl.simulate(), pytest.raises(SimulationError, match="calls cuTensorMapEncodeTiled, which the simulated device has not"):
        programs.TileCopy()(from_dlpack(x, assumed_align=16), from_dlpack(x))


def test_cooperative_launches_are_refused() -> None:
    x, y = vectors(2)
    with cute_dsl.simulate(), pytest.raises(SimulationError, match="cooperative launch; supported"):
        programs.add_cooperatively(from_dlpack(x), from_dlpack(y))


def test_a_launch_ends_at_its_limit() -> None:
    x, y = vectors(2)
    with cute_dsl.simulate(most_instructions=1, on_finding="collect", schedule="adversarial") as device:
        programs.add(from_dlpack(x), from_dlpack(y), Float32(0))
    assert [finding.kind for finding in device.findings] == ["instruction_limit"]


def test_a_compiled_program_runs_in_a_later_block_and_nowhere_else() -> None:
    x, y = vectors(2)
    with cute_dsl.simulate():
        args = from_dlpack(x), from_dlpack(y), Float32(1)
        compiled = cute.compile(programs.add, *args)
        compiled(*args)
    with cute_dsl.simulate(schedule="adversarial", code="sass") as device:
        compiled(*args[:2], Float32(3))
    assert torch.equal(y, x + 3)
    assert len(device.launches) == 1
    with pytest.raises(Exception, match="cudaErrorNoDevice"):
        compiled(*args)
    assert torch.equal(y, x + 3)


def test_a_program_of_another_architecture_is_refused() -> None:
    x, y = vectors(2)
    with cute_dsl.simulate("sm_90a"):
        args = from_dlpack(x), from_dlpack(y), Float32(1)
        compiled = cute.compile(programs.add, *args, options="--gpu-arch sm_100a")
        with pytest.raises(SimulationError, match="outside of a simulated device, or for another architecture"):
            compiled(*args)


@pytest.fixture
def tvm_ffi() -> None:
    """Skip without the package apache-tvm-ffi, of the dev extra."""
    pytest.importorskip("tvm_ffi")


@pytest.mark.usefixtures("tvm_ffi")
def test_programs_with_tvm_ffi_take_torch_tensors() -> None:
    x, y = vectors(2)
    with cute_dsl.simulate() as device:
        fake = make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4)
        compiled = cute.compile(programs.add, fake, fake, Float32(0), options="--enable-tvm-ffi")
        compiled(x, y, 0.5)
        assert torch.equal(y, x + 0.5)
        compiled(from_dlpack(x, enable_tvm_ffi=True), y=y, offset=1.5)
        assert torch.equal(y, x + 1.5)
    assert len(device.launches) == 2
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        compiled(x, y, 0.5)
    with pytest.raises(Exception, match="cudaErrorNoDevice"):
        compiled(*(from_dlpack_on_device(tensor) for tensor in (x, y)), 0.5)
    with cute_dsl.simulate(code="sass"):
        compiled(x, y, 2.5)
    assert torch.equal(y, x + 2.5)


def from_dlpack_on_device(tensor: torch.Tensor) -> Any:
    from tvm_ffi import from_dlpack as convert

    return convert(DeviceView(tensor))


@pytest.mark.usefixtures("tvm_ffi")
def test_findings_of_programs_with_tvm_ffi_are_raised() -> None:
    x, y = torch.randn(CTAS * TILE, TILE), torch.zeros(CTAS * TILE, TILE)
    with cute_dsl.simulate():
        tensors = [from_dlpack(tensor, assumed_align=16, enable_tvm_ffi=True) for tensor in (x, y)]
        cute.compile(programs.TileCopy(), *tensors, options="--enable-tvm-ffi")(x, y)
        assert torch.equal(x, y)
        with pytest.raises(SimulationError, match="missing_wait"):
            cute.compile(programs.TileCopy(waits=False), *tensors, options="--enable-tvm-ffi")(x, y)
        with pytest.raises(UnsupportedInstruction, match="brkpt"):
            cute.compile(programs.unknown, options="--enable-tvm-ffi")()


@pytest.mark.usefixtures("tvm_ffi")
def test_tensors_inside_arguments_of_tvm_ffi_are_operands() -> None:
    x, y = vectors(2)
    with cute_dsl.simulate():
        pair = tuple(from_dlpack(tensor, enable_tvm_ffi=True) for tensor in (x, y))
        compiled = cute.compile(programs.add_pair, pair, options="--enable-tvm-ffi")
        compiled((x, y))
    assert torch.equal(y, x + 1)


def test_host_code_is_told_of_the_device() -> None:
    with cute_dsl.simulate("sm_100a", sm_count=8):
        assert CuTeDSL._get_dsl().get_arch_enum().name == "sm_100a"
        assert HardwareInfo().get_max_active_clusters(2) == 4
        assert HardwareInfo().get_device_multiprocessor_count() == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu_arch": "sm_80"}, "gpu_arch is 'sm_80'; supported: sm_90a, sm_100a, sm_103a"),
        ({"on_finding": "print"}, "on_finding is 'print'; supported: raise, collect"),
        ({"code": "cubin"}, "code is 'cubin'; supported: ptx, sass"),
        ({"schedule": "slow"}, "schedule 'slow': supported are round_robin, lazy, random, adversarial"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), cute_dsl.simulate(**given):
        pass


def test_the_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass.base_dsl.compiler", None)
    for name in [name for name in sys.modules if name.startswith("cute_mla.simulator.cute_dsl")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=re.escape("pip install 'cute-mla[build]'")):
        importlib.import_module("cute_mla.simulator.cute_dsl")


def changed_things() -> list[dict[str, Any]]:
    owners = (
        BaseDSL,
        Compiler,
        ExecutionArgs,
        JitCompiledFunction,
        JitExecutor,
        CudaDialectJitCompiledFunction,
        _Tensor,
        HardwareInfo,
        cuda,
    )
    dsl = CuTeDSL._get_dsl()
    state = {"cache": dsl.jit_cache, "arch": dsl.envar._arch, "file_caching": dsl.envar.disable_file_caching}
    return [*(dict(vars(owner)) for owner in owners), state]


@pytest.mark.parametrize("fails", [False, True])
def test_the_dsl_is_as_before_behind_the_block(fails: bool) -> None:
    before = changed_things()
    x, y = vectors(2)
    try:
        with cute_dsl.simulate():
            assert changed_things() != before
            cute.compile(programs.add, from_dlpack(x), from_dlpack(y), Float32(0))(
                from_dlpack(x), from_dlpack(y[: -fails or None]), Float32(0)
            )
            with pytest.raises(RuntimeError, match="one at a time"), cute_dsl.simulate():
                pass
            assert changed_things() != before
    except SimulationError:
        assert fails
    else:
        assert not fails
    assert changed_things() == before
    assert from_dlpack(x).memspace == cute.AddressSpace.generic
    assert not cute.compile._compile_options.full_ptx_path
