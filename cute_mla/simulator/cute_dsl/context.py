"""The context in which CuTe-DSL programs are compiled for, and run on, a simulated device: what it changes in the DSL, and undoes."""

from __future__ import annotations

import copy
import ctypes
import inspect
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cutlass.base_dsl.cache_helpers import JitCacheDict
from cutlass.base_dsl.compiler import Compiler, DumpDir, GenerateLineInfo, KeepCUBIN, KeepPTX
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.base_dsl.jit_executor import ExecutionArgs, JitCompiledFunction, JitExecutor
from cutlass.base_dsl.runtime import cuda
from cutlass.cute.runtime import _Tensor
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
from cutlass.utils import HardwareInfo

from ..engine.policy import Policy
from ..findings import SimulationError
from .device import ProgramDevice
from .memory import DeviceView
from .program import Program

_active: list[ProgramDevice] = []


@contextmanager
def simulate(
    gpu_arch: str = "sm_90a",
    schedule: str = "round_robin",
    seed: int = 0,
    on_finding: str = "raise",
    code: str = "ptx",
    ignored: Collection[str] = (),
    sm_count: int | None = None,
    most_instructions: int = 100_000_000,
) -> Iterator[ProgramDevice]:
    """Run CuTe-DSL programs on the memory of CPU tensors on a simulated device. No GPU and no driver are needed.

    gpu_arch: "sm_90a", "sm_100a" or "sm_103a". schedule, seed: the order in which warps advance and asynchronous work completes
    (`Policy.named`).
    on_finding: "raise" raises SimulationError from the call that made the launch, "collect" fills device.findings.
    code: "ptx" or "sass", the machine code. ignored: kinds of findings that are not reported.
    sm_count: streaming multiprocessors that host code is told of; default those of the usual board.
    most_instructions: warp instructions that end a launch, with a finding.

    Programs must be compiled inside. The DSL is changed in the whole process until the block ends, so other threads must not use it.
    Raises RuntimeError inside another such block.
    """
    if _active:
        raise RuntimeError("a simulated device is active already; supported: one at a time")
    policy = replace(Policy.named(schedule, seed), ignored=frozenset(ignored), most_instructions=most_instructions)
    device = ProgramDevice(gpu_arch, policy, on_finding, code, sm_count)
    with ExitStack() as stack:
        _active.append(device)
        stack.callback(_active.clear)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        patches = _Patches(device, Path(folder), stack)
        for patch in patches.all():
            stack.enter_context(_replaced(*patch))
        patches.adopt(CuTeDSL._get_dsl())  # host code may ask for the architecture before it compiles anything
        yield device


Patch = tuple[Any, str, Any]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Patches:
    """Replacements of functions of the DSL. folder: where the DSL writes PTX and cubins. stack: undoes what is changed later on."""

    def __init__(self, device: ProgramDevice, folder: Path, stack: ExitStack) -> None:
        self._device = device
        self._folder = folder
        self._stack = stack
        self._dsls: list[Any] = []
        self._options: Any = None  # of the compilation in progress

    def all(self) -> Iterator[Patch]:
        """Yield each object, the name of its attribute, and the replacement."""
        yield BaseDSL, "_prepare_compilation", self._prepare_compilation(BaseDSL._prepare_compilation)
        yield Compiler, "jit", self._jit(Compiler.jit)
        yield ExecutionArgs, "generate_execution_args", self._generate_execution_args(ExecutionArgs.generate_execution_args)
        yield JitCompiledFunction, "_validate_engine", lambda function: _program(function.engine)
        yield JitExecutor, "run_compiled_program", self._run_compiled_program(JitExecutor.run_compiled_program)
        loads = CudaDialectJitCompiledFunction._load_cuda_library
        yield CudaDialectJitCompiledFunction, "_load_cuda_library", self._load_cuda_library(loads)
        yield CudaDialectJitCompiledFunction, "num_devices", 1
        yield _Tensor, "__init__", _tensor_in_device_memory(_Tensor.__init__)
        yield _Tensor, "__c_pointers__", self._c_pointers(_Tensor.__c_pointers__)
        yield cuda, "initialize_cuda_context", lambda device_id=0, flags=0: None
        yield cuda, "stream_sync", lambda stream: None
        if find_spec("tvm_ffi"):
            from . import tvm_ffi

            yield from tvm_ffi.patches(self._device, self._begin_tvm_ffi_call)
        yield HardwareInfo, "__init__", lambda info, device_id=0: None
        yield HardwareInfo, "get_device_multiprocessor_count", lambda info: self._device.sm_count
        yield HardwareInfo, "get_max_active_clusters", lambda info, cluster_size, stream=None: self._device.sm_count // cluster_size

    def _prepare_compilation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Compile for the device, keep the code, and begin a call: that of a function which is called without `cute.compile`."""

        def prepare(dsl: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.adopt(dsl)
            options = copy.deepcopy(dsl.compile_options)  # cute.compile's own object, which outlives this block
            for option in (KeepPTX, KeepCUBIN, GenerateLineInfo):
                options.options[option].value = True
            if not options.options[DumpDir].value:
                options.options[DumpDir].value = str(self._folder)
            dsl.compile_options = self._options = options
            setup = original(dsl, function, *args, **kwargs)
            arguments = dict(zip(setup.sig.parameters, setup.canonicalized_args, strict=False)) | setup.canonicalized_kwargs
            self._device.begin_call(_names(arguments))
            return setup

        return prepare

    def adopt(self, dsl: Any) -> None:
        """Give a DSL the device's architecture, and a cache of its own: functions compiled outside launch on a GPU."""
        if dsl in self._dsls:
            return
        self._dsls.append(dsl)
        for owner, name, value in (
            (dsl, "jit_cache", JitCacheDict()),
            (dsl.envar, "_arch", self._device.gpu_arch),
            (dsl.envar, "disable_file_caching", True),
        ):
            self._stack.enter_context(_replaced(owner, name, value))

    def _jit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Link host code with the stand-ins."""

        def jit(compiler: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            engine = original(compiler, module, *args, **kwargs)
            paths = {"ptx": Path(self._options.full_ptx_path), "sass": Path(self._options.full_cubin_path)}
            code = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
            engine.simulated_program = program = Program(code, _called(module))
            for name, function in program.functions.items():
                engine.raw_register_runtime(name, ctypes.cast(function, ctypes.c_void_p))
            return engine

        return jit

    def _generate_execution_args(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Begin the call of a compiled function."""

        def generate(execution_args: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._begin_call(execution_args, args, kwargs)
            return original(execution_args, args, kwargs)

        return generate

    def _begin_call(self, execution_args: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget the operands of the call before; those of this one have the names of its parameters."""
        arguments = dict(zip(execution_args.signature.parameters, args, strict=False)) | kwargs
        self._device.begin_call(_names(arguments))

    def _begin_tvm_ffi_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        self._begin_call(function.execution_args, args, kwargs)
        return _program(function.engine)

    def _run_compiled_program(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(executor: Any, exe_args: Any) -> Any:
            with _program(executor.jit_module.engine).on(self._device):
                return original(executor, exe_args)

        return execute

    def _load_cuda_library(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(function: Any) -> list[Any]:
            with _program(function.engine).on(self._device):
                original(function)
            return []  # a driver must not be asked to unload the handle

        return load

    def _c_pointers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Add each tensor that is handed to host code to the operands of the call."""

        def c_pointers(tensor: Any) -> Any:
            self._device.add_operand(tensor)
            return original(tensor)

        return c_pointers


def _tensor_in_device_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(tensor: Any, of: Any, *args: Any, **kwargs: Any) -> None:
        original(tensor, DeviceView(of), *args, **kwargs)

    return init


def _program(engine: Any) -> Program:
    program = getattr(engine, "simulated_program", None)
    if program is None:
        raise SimulationError(
            "the program was compiled outside of a simulated device, or for another architecture; supported: compiled inside, for its own"
        )
    assert isinstance(program, Program)
    return program


def _called(module: Any) -> set[str]:
    """Return the CUDA functions that the host code of a module declares."""
    names = {
        op.attributes["sym_name"].value for op in module.body.operations if op.operation.name == "llvm.func" and not op.regions[0].blocks
    }
    return {name for name in names if name.startswith("_cu")}


def _names(arguments: dict[str, Any]) -> dict[int, str]:
    """Return the parameters that are tensors, of torch or of the DSL, by address."""
    found = {}
    for name, argument in arguments.items():
        address = inspect.getattr_static(argument, "data_ptr", None) and argument.data_ptr
        if address is not None:
            found[address() if callable(address) else address] = name
    return found
