"""torch.compile, for tests: in one graph, with its compilations counted, and nothing left of the test before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what was compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """Return the function compiled in one graph, and what counts its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter
