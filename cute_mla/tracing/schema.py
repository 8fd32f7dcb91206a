"""Signatures of functions in torch's notation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

_KINDS = {torch.Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}


def arguments_of(function: Callable[..., Any], without: tuple[str, ...], spelled: Mapping[str, str]) -> str:
    """Return the arguments of an op with the signature of a function, such as "Tensor q, float? softmax_scale=None, *, bool causal=False".

    without: arguments that the op lacks. spelled: the text of an argument whose annotation does not say it all, such as that of a tensor to
    write to; it may name several arguments of the op, or none.
    """
    hints = get_type_hints(function)
    lists: tuple[list[str], list[str]] = ([], [])  # by position or name, and by name alone
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in without:
            text = spelled[name] if name in spelled else _argument(parameter, hints[name])
            lists[parameter.kind is inspect.Parameter.KEYWORD_ONLY].extend([text] if text else [])
    plain, named = lists
    return ", ".join((*plain, "*", *named) if named else plain)


def _argument(parameter: inspect.Parameter, hint: Any) -> str:
    """Return an argument with its type and default. torch has no infinity: a default of inf becomes None."""
    members = {member for member in get_args(hint) if member is not type(None)} if type(None) in get_args(hint) else {hint}
    (member,) = members
    kind = "str" if get_origin(member) is Literal else _KINDS[member]
    default = None if parameter.default == math.inf else parameter.default
    text = f"{kind}{'?' if default is None or member is not hint else ''} {parameter.name}"
    return text if default is inspect.Parameter.empty else f"{text}={default!r}"
