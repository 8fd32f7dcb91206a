"""Detection of tracing by torch.compile, torch.export and make_fx, whose tensors have no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from ..ops.tensor_spec import is_stand_in

F = TypeVar("F", bound=Callable[..., Any])

# Returns the number of active dispatch modes: those of tracers, and users' own.
dispatch_modes = torch._C._len_torch_dispatch_stack


def is_traced(tensor: Any) -> bool:
    """Return whether a call with this tensor is being traced. A traced call must become an op, because its tensors have no address.

    Callers on a fast path first ask three questions, in a tenth of a microsecond: is_dynamo_compiling() is False, dispatch_modes() is 0 and
    the tensor's class is torch.Tensor itself in nearly every call that is not traced.
    """
    if is_dynamo_compiling() or is_stand_in(tensor):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def constant_when_traced(function: F) -> F:
    """Mark a function whose result torch.compile treats as a constant.

    Equals torch.compiler.assume_constant_result, which would load the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
