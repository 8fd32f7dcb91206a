"""The block of simulate(): who is inside of it, when generators are suspended and when blocks end in any order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from cute_mla.runtime.current import device_for, has_kernels, simulate
from cute_mla.runtime.device import Device
from cute_mla.spec.arch import SM90, SM100

CPU = torch.device("cpu")


def arch_here() -> str | None:
    """Return the architecture of the device of CPU tensors."""
    return device_for(CPU).arch.name if has_kernels(CPU, "merge_states") else None


def steps(arch: str) -> Iterator[str | None]:
    """Yield twice inside a block."""
    with simulate(arch, sm_count=1):
        yield arch_here()
        yield arch_here()


def test_the_caller_of_a_suspended_generator_is_outside_of_its_block() -> None:
    found = []
    for inside in steps("sm90"):
        found.append((inside, arch_here()))
        with pytest.raises(ValueError, match="got CPU tensors: supported are CUDA tensors"):
            device_for(CPU)
    assert found == [("sm90", None)] * 2
    assert arch_here() is None


def test_the_caller_keeps_its_own_device() -> None:
    with simulate("sm100", sm_count=1):
        assert [(inside, arch_here()) for inside in steps("sm90")] == [("sm90", "sm100")] * 2
        assert arch_here() == "sm100"


def delegated() -> Iterator[str | None]:
    yield from steps("sm90")


def iterated() -> Iterator[str | None]:
    for inside in steps("sm90"):
        assert arch_here() is None
        yield inside


@pytest.mark.parametrize("generator", [delegated, iterated])
def test_generators_of_generators(generator: Callable[[], Iterator[str | None]]) -> None:
    running = generator()
    assert [(next(running), arch_here()) for _ in range(2)] == [("sm90", None)] * 2


def test_functions_that_a_generator_calls_are_inside() -> None:
    def nested() -> str | None:
        return arch_here()

    def calling() -> Iterator[str | None]:
        with simulate("sm90", sm_count=1):
            yield nested()
            yield next(steps("sm100"))
            yield arch_here()

    assert list(calling()) == ["sm90", "sm100", "sm90"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_end_in_any_order(order: tuple[int, int]) -> None:
    generators = [steps("sm90"), steps("sm100")]
    assert [next(generator) for generator in generators] == ["sm90", "sm100"]
    for i in order:
        generators[i].close()  # type: ignore[attr-defined]
        assert arch_here() is None
    with simulate("sm90", sm_count=1):
        assert arch_here() == "sm90"
    assert arch_here() is None


def test_a_block_that_ends_after_the_one_inside_of_it_was_closed_by_hand() -> None:
    outer, inner = simulate("sm90", sm_count=1), simulate("sm100", sm_count=1)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert arch_here() == "sm100"
    inner.__exit__(None, None, None)
    assert arch_here() is None


@contextmanager
def chosen(arch: str) -> Iterator[Device]:
    """Yield a device as a context manager does."""
    with simulate(arch, sm_count=1) as device:
        yield device


@pytest.fixture
def on_sm100() -> Iterator[Device]:
    with chosen("sm100") as device:
        yield device


def test_context_managers_and_fixtures_have_their_effect(on_sm100: Device) -> None:
    assert arch_here() == on_sm100.arch.name == SM100.name
    with chosen("sm90") as device:
        assert device_for(CPU) is device
        assert device.arch is SM90
    with ExitStack() as stack:
        stack.enter_context(chosen("sm90"))
        stack.enter_context(simulate("sm90", sm_count=1))
        assert arch_here() == "sm90"
    assert arch_here() == SM100.name


def test_a_context_manager_inside_a_suspended_generator() -> None:
    def wrapped() -> Iterator[str | None]:
        with ExitStack() as stack:
            stack.enter_context(chosen("sm90"))
            yield arch_here()

    assert [(inside, arch_here()) for inside in wrapped()] == [("sm90", None)]


def test_tasks_and_asynchronous_generators() -> None:
    async def asynchronous(arch: str) -> AsyncIterator[str | None]:
        with simulate(arch, sm_count=1):
            await asyncio.sleep(0)
            yield arch_here()
            await asyncio.sleep(0)
            yield arch_here()

    async def consume(arch: str) -> list[tuple[str | None, str | None]]:
        return [(inside, arch_here()) async for inside in asynchronous(arch)]

    async def both() -> list[list[tuple[str | None, str | None]]]:
        return list(await asyncio.gather(consume("sm90"), consume("sm100")))

    assert asyncio.run(both()) == [[("sm90", None)] * 2, [("sm100", None)] * 2]


def test_a_generator_that_is_closed_by_another_thread() -> None:
    generator = steps("sm90")
    next(generator)
    closing = threading.Thread(target=generator.close)  # type: ignore[attr-defined]
    closing.start()
    closing.join()
    assert arch_here() is None
    with simulate("sm100", sm_count=1):
        assert arch_here() == "sm100"
    assert arch_here() is None
