"""Calls that are found again: by all that their checks looked at, and by nothing less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_mla.runtime import call_cache
from cute_mla.runtime.call_cache import CallCache, comparison, guard


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

    def pick(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tensors

    def fits(self, given: tuple[torch.Tensor, ...], addresses: list[int]) -> bool:
        assert addresses == [tensor.data_ptr() for tensor in given]
        return self.like(*given)


def found(kept: CallCache, key: str, given: list[torch.Tensor]) -> Any:
    """Return the name of the call that is found."""
    match = kept.find(key, tuple(given))
    return None if match is None else match[0].name


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

    monkeypatch.setattr(call_cache.importlib, "import_module", gone)
    fits = guard(tensors())
    assert fits(*tensors())
    assert not fits(*tensors()[::-1])


def test_calls_of_one_key_are_kept_beside_each_other() -> None:
    kept = CallCache()
    sizes = range(1, 6)
    for size in sizes:
        kept.add("key", (3,), Kept(size, [torch.zeros(3), torch.zeros(size)]))
    assert [found(kept, "key", [torch.zeros(3), torch.zeros(size)]) for size in sizes] == [None, 2, 3, 4, 5]
    assert found(kept, "other key", [torch.zeros(3), torch.zeros(5)]) is None
    assert found(kept, "key", [torch.zeros(2), torch.zeros(5)]) is None


def test_what_was_kept_or_found_last_is_the_latest() -> None:
    kept = CallCache()
    for size in (1, 2):
        kept.add("key", (size,), Kept(size, [torch.zeros(size)]))
    assert kept.latest["key"].name == 2
    assert found(kept, "key", [torch.zeros(1)]) == 1
    assert kept.latest["key"].name == 1


def test_calls_of_several_keys_in_turn() -> None:
    kept = CallCache()
    for key in "ab":
        kept.add(key, tensors()[0].shape, Kept(key, tensors()))
    assert [found(kept, key, tensors()) for key in "abbaab"] == list("abbaab")


def test_the_oldest_keys_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_MAX_SHAPES", 3)
    kept = CallCache()
    for key in "abcde":
        kept.add(key, tensors()[0].shape, Kept(key, tensors()))
    assert [found(kept, key, tensors()) for key in "abcde"] == [None, None, "c", "d", "e"]
    assert len(kept.calls()) == len(kept.latest) == 3


def test_a_key_with_many_shapes_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_MAX_SHAPES", 3)
    kept = CallCache()
    for size in range(5):
        kept.add("key", (size,), Kept(size, [torch.zeros(size)]))
    assert [found(kept, "key", [torch.zeros(size)]) for size in range(5)] == [None, None, 2, 3, 4]
    assert len(kept.calls()) == 3
