"""Public functions from signatures: their bodies are generated when they are imported, as dataclasses generate __init__.

A public function is written as a signature and a reference page. Its body would name every argument twice more, for the op of torch and for
the eager body, and a call that collects its arguments in a dict instead would cost 2 us more.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from ..ops.decode import Source
from .detection import dispatch_modes, is_dynamo_compiling, is_traced
from .register import Function, TorchOp

F = TypeVar("F", bound=Callable[..., Any])

_DETECTION = {"is_dynamo_compiling": is_dynamo_compiling, "dispatch_modes": dispatch_modes, "is_traced": is_traced, "Tensor": Tensor}


def public(op: TorchOp, tensor: str = "q", also: tuple[Function, str] | None = None, name: str | None = None) -> Callable[[F], F]:
    """Return a decorator of functions without a body: a traced call becomes a call of the op, any other one a call of its `run`.

    It registers the op. tensor: the expression that detection of tracing looks at. also: a function, and the names of the arguments with
    which it returns True where a call that is not traced becomes an op, too. name: of the op, by default that of the function.
    """

    def decorate(function: F) -> F:
        source = op.run if isinstance(op.run, Source) else Source((f"return run({_passed_on(function)})",), {"run": op.run})
        run = generated(function, *source) if source is op.run else op.run
        names = {**source.names, "traced": replace(op, run=run).register(function, name), "also": also and also[0]}
        return generated(function, (*_traced_lines(function, tensor, also), *source.lines), names)

    return decorate


def generated(function: F, lines: Sequence[str], names: Mapping[str, Any]) -> F:
    """Return a function with the signature and the page of `function`. lines: the source of its body. names: those that it uses."""
    head = inspect.signature(function)
    bare = head.replace(
        parameters=[
            parameter.replace(annotation=parameter.empty, default=parameter.empty if parameter.default is parameter.empty else None)
            for parameter in head.parameters.values()
        ],
        return_annotation=head.empty,
    )
    source = "\n    ".join((f"def {function.__name__}{bare}:", *lines)) + "\n"
    file = f"<body of {function.__module__}.{function.__qualname__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), {**_DETECTION, **names}, made)
    body = made[function.__name__]
    for attribute in ("__module__", "__qualname__", "__doc__", "__annotations__", "__defaults__", "__kwdefaults__"):
        setattr(body, attribute, getattr(function, attribute))
    return body


def _traced_lines(function: Function, tensor: str, also: tuple[Function, str] | None) -> tuple[str, ...]:
    """Return the lines that call the op. The first three questions take a tenth of a microsecond, and settle nearly every call."""
    condition = f"(is_dynamo_compiling() or dispatch_modes() or {tensor}.__class__ is not Tensor) and is_traced({tensor})"
    if also is not None:
        condition = f"({condition}) or also({also[1]})"
    arguments = ", ".join(f"{name}={name}" for name in inspect.signature(function).parameters)
    return f"if {condition}:", f"    return traced({arguments})"


def _passed_on(function: Function) -> str:
    """Return the arguments of a call with the parameters of a function."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(f"{each.name}={each.name}" if each.kind is each.KEYWORD_ONLY else each.name for each in parameters)
