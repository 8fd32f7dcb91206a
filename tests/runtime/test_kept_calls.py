"""Calls that are found again: by all that their checks looked at, and by nothing less."""

from __future__ import annotations

from collections.abc import Callable

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


def test_a_tensor_given_twice_is_found_again() -> None:
    kept = KeptCalls()
    tensor = torch.zeros(1)
    kept.keep("key", [tensor, tensor], "call")
    assert kept.find("key", [tensor, tensor]) == "call"


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
        kept.keep("key", [torch.zeros(size)], size)
    assert [kept.find("key", [torch.zeros(size)]) for size in sizes] == [None, 2, 3, 4, 5]
    assert kept.find("other key", [torch.zeros(5)]) is None


def test_the_oldest_keys_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_calls, "_KEYS", 3)
    kept = KeptCalls()
    for key in range(5):
        kept.keep(key, tensors(), key)
    assert [kept.find(key, tensors()) for key in range(5)] == [None, None, 2, 3, 4]
    assert len(kept.calls()) == 3
