"""Calls that are found again: by all that their checks looked at, and by nothing less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_mla.runtime import kept_calls
from cute_mla.runtime.kept_calls import KeptCalls, comparison, guard


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(4, 8, 16, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32), torch.zeros(1)]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda t: t.to(torch.float16),
    "shape": lambda t: t[:3],
    "strides": lambda t: torch.zeros(8, 4, 16, dtype=t.dtype).transpose(0, 1),
    "rank": lambda t: t[None],
    "device": lambda t: t.to("meta"),
    "class": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "gradient": lambda t: t.requires_grad_(),
}


@pytest.mark.parametrize("make", [guard, comparison])
def test_equal_looks_fit_whatever_the_values(make: Callable[..., Callable[..., bool]]) -> None:
    fits = make(tensors())
    assert fits(*tensors())
    assert fits(*[torch.ones_like(tensor) for tensor in tensors()])


@pytest.mark.parametrize("make", [guard, comparison])
@pytest.mark.parametrize("change", CHANGES)
def test_any_other_look_does_not_fit(make: Callable[..., Callable[..., bool]], change: str) -> None:
    others = tensors()
    others[0] = CHANGES[change](others[0])
    assert not make(tensors())(*others)


class Kept:
    """A call with a guard of its own."""

    def __init__(self, name: Any, given: list[torch.Tensor]) -> None:
        self.name = name
        self.like = guard(given)

    def fits(self, given: list[torch.Tensor]) -> bool:
        return self.like(*given)


def found(kept: KeptCalls, key: str, shape: tuple[int, ...], given: list[torch.Tensor]) -> Any:
    """Return the name of the call that is found."""
    call = kept.find(key, shape, given)
    return None if call is None else call.name


def test_a_tensor_given_twice_fits() -> None:
    tensor = torch.zeros(1)
    assert guard([tensor, tensor])(tensor, tensor)


@pytest.mark.parametrize("make", [guard, comparison])
def test_a_tensor_that_would_need_a_gradient_does_not_fit(make: Callable[..., Callable[..., bool]]) -> None:
    tensor = torch.zeros(1, requires_grad=True)
    with torch.no_grad():
        fits = make([tensor])
        assert fits(tensor)
    assert not fits(tensor)


def test_without_the_guards_of_torch_python_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(kept_calls.importlib, "import_module", gone)
    fits = guard(tensors())
    assert fits(*tensors())
    assert not fits(*tensors()[::-1])


def test_calls_of_one_key_are_kept_beside_each_other() -> None:
    kept = KeptCalls()
    sizes = range(1, 6)
    for size in sizes:
        kept.keep("key", (1,), Kept(size, [torch.zeros(size)]))
    assert [found(kept, "key", (1,), [torch.zeros(size)]) for size in sizes] == [None, 2, 3, 4, 5]
    assert found(kept, "other key", (1,), [torch.zeros(5)]) is None
    assert found(kept, "key", (2,), [torch.zeros(5)]) is None


def test_what_was_kept_or_found_last_is_the_latest() -> None:
    kept = KeptCalls()
    for size in (1, 2):
        kept.keep("key", (size,), Kept(size, [torch.zeros(size)]))
    assert kept.latest["key"].name == 2
    assert found(kept, "key", (1,), [torch.zeros(1)]) == 1
    assert kept.latest["key"].name == 1


def test_the_oldest_keys_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_calls, "_SHAPES", 3)
    kept = KeptCalls()
    for key in "abcde":
        kept.keep(key, (), Kept(key, tensors()))
    assert [found(kept, key, (), tensors()) for key in "abcde"] == [None, None, "c", "d", "e"]
    assert len(kept.calls()) == len(kept.latest) == 3


def test_a_key_with_many_shapes_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_calls, "_SHAPES", 3)
    kept = KeptCalls()
    for size in range(5):
        kept.keep("key", (size,), Kept(size, tensors()))
    assert [found(kept, "key", (size,), tensors()) for size in range(5)] == [None, None, 2, 3, 4]
    assert len(kept.calls()) == 3
