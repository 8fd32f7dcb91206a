"""Registration of the ops of torch.

The namespace is the name of the package: copies of it under other names, such as versions of a kernel package, live in one process.

Each op runs an eager body. A call that is not traced never comes here, because torch's dispatcher costs more than the call. Each op
allocates its results; the op beside it whose name ends in _out writes to the caller's. Arguments are those of the public functions,
without results, except that a plan is always two tensors and that empty_lse None means inf. Fakes stand for the ops while they are traced;
they give shapes and dtypes, and other errors appear when the call is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..ops.arguments import NO_BACKWARD, check_no_grad
from ..ops.decode import Source
from .schema import arguments_of

Function = Callable[..., Any]

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_NAMESPACE = __name__.rsplit(".", 2)[0].replace(".", "_")
_library = torch.library.Library(_NAMESPACE, "DEF")
ops = getattr(torch.ops, _NAMESPACE)


class Gradient(NamedTuple):
    """The backward pass of an op, as torch.library.register_autograd takes it."""

    backward: Function
    setup_context: Function | None = None


def nothing(**arguments: Any) -> None:
    """Stand for an op that writes to tensors of the caller."""


def as_it_is(call: Function, arguments: dict[str, Any]) -> Any:
    """Call an op with the arguments of the public function."""
    return call(**arguments)


@dataclass(frozen=True)
class TorchOp:
    """The op of a function, its signature's arguments without results.

    run: eager body, with the arguments of the function. body: that of the op, where its arguments are other ones.
    fake: allocates the results, given by name all arguments of the op but results.
    results: arguments that the op allocates, in the order in which it returns them; a "?" behind the name of a workspace.
    returned: what the op returns, in torch's notation, where that is not `results`.
    spelled, without: as arguments_of takes them.
    gradients: of the op and of the one that ends in _out; a string refuses tensors that require gradients, and says what is supported.
    traced: makes a traced call, given a function that calls the op, and the public function's arguments.
    """

    run: Function | Source
    fake: Function = nothing
    results: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    gradients: tuple[Gradient | str, str] = (NO_BACKWARD, NO_BACKWARD)
    traced: Callable[[Function, dict[str, Any]], Any] = as_it_is
    body: Function | None = None
    without: tuple[str, ...] = ()
    returned: str | None = None

    def register(self, function: Function, name: str | None = None) -> Function:
        """Register the op, and the op that ends in _out if there are results. Return a function that calls the right one of them.

        function: its signature is that of the op. name: of the op, by default that of the function.
        """
        name = name or function.__name__
        outs = tuple(out.rstrip("?") for out in self.results)
        new = tuple(out for out in self.results if out in outs)
        arguments = arguments_of(function, (*outs, *self.without), self.spelled)
        body: Any = self.body or self.run

        def run(*args: Any, **options: Any) -> Any:
            if "empty_lse" in arguments and options.get("empty_lse") is None:
                options["empty_lse"] = math.inf
            return body(*args, **options)

        def write(*args: Any, **options: Any) -> None:
            run(*args, **options)

        returned = self.returned or f"({', '.join(f'Tensor {out}' for out in new)})"
        _define(f"{name}({arguments}) -> {returned}", run, self.fake, self.gradients[0])
        if outs:
            typed = zip("abcd", self.results, outs, strict=False)
            written = [f"Tensor({letter}!){'' if result == out else '?'} {out}" for letter, result, out in typed]
            _define(
                f"{name}_out({arguments}, {'' if '*' in arguments else '*, '}{', '.join(written)}) -> ()", write, nothing, self.gradients[1]
            )
        call = _caller(name, self.fake, outs, new)
        return lambda **arguments: self.traced(call, arguments)


def _caller(name: str, fake: Function, outs: tuple[str, ...], new: tuple[str, ...]) -> Function:
    """Return a function that calls an op or, if the caller gives a result or a workspace, the op that writes to given tensors."""

    def call(**arguments: Any) -> Any:
        given = {out: arguments.pop(out, None) for out in outs}
        if all(tensor is None for tensor in given.values()):
            return getattr(ops, name)(**arguments)
        if any(given[out] is None for out in new):
            made = fake(**arguments)
            for out, tensor in zip(new, made if isinstance(made, tuple) else (made,), strict=True):
                given[out] = tensor if given[out] is None else given[out]
        getattr(ops, f"{name}_out")(**arguments, **given)
        return tuple(given[out] for out in new) if len(new) > 1 else given[new[0]]

    return call


def _define(schema: str, run: Function, fake: Function, gradient: Gradient | str) -> None:
    """Register an op."""
    _library.define(schema, tags=_TAGS)
    name = schema[: schema.index("(")]
    op = getattr(ops, name).default
    _library.impl(name, run, "CompositeExplicitAutograd")
    if isinstance(gradient, str):
        _library.impl(name, _refusal(op, gradient), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(f"{_NAMESPACE}::{name}", gradient.backward, setup_context=gradient.setup_context, lib=_library)
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}

    def named_fake(*args: Any, **options: Any) -> Any:
        return fake(**{**defaults, **dict(zip(defaults, args, strict=False)), **options})

    torch.library.register_fake(f"{_NAMESPACE}::{name}", named_fake, lib=_library)


def _refusal(op: Any, supported: str) -> Function:
    """Return the autograd kernel of an op that refuses tensors that require gradients."""
    named = [argument.name for argument in op._schema.arguments]

    def refuse(keys: torch._C.DispatchKeySet, /, *args: Any, **options: Any) -> Any:
        for argument, value in (*zip(named, args, strict=False), *options.items()):
            for tensor in value if isinstance(value, list) else (value,):
                check_no_grad(supported, **{argument: tensor})
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **options)

    return refuse
