"""Whether a call is made or only written down: by torch.compile, torch.export or make_fx, whose tensors have no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling

F = TypeVar("F", bound=Callable[..., Any])

# How many dispatch modes surround a call: those of tracers, and users' own.
dispatch_modes = torch._C._len_torch_dispatch_stack


def is_traced(tensor: Any) -> bool:
    """Whether a call with this tensor is being traced. Then it must become an op, for the tensor has no address.

    Without traces is_dynamo_compiling() is False, dispatch_modes() mostly 0 and tensors mostly torch.Tensor itself, which takes a tenth of
    a microsecond to find out: callers on a fast path ask these first.
    """
    if is_dynamo_compiling() or isinstance(tensor, FakeTensor | FunctionalTensor):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def constant_when_traced(function: F) -> F:
    """Marks a function that torch.compile calls while it compiles, to take its answer, a Python constant, for granted from then on.

    As torch.compiler.assume_constant_result, which loads the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
