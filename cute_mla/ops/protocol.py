"""The protocol of an op: check -> plan -> run.

Every op is a module of this folder:

    CallSpec    a hashable NamedTuple: everything that decides on a launch, but for values and addresses
    check       takes operands, options and results; looks at each argument by itself; returns the CallSpec
    plan        takes a CallSpec, and the device where it matters; checks that shapes, strides and dtypes fit together; returns the
                LaunchPlan; cached
    run         takes the arguments of the public function, in its order; checks and plans, allocates missing results, launches;
                returns the results

`check` and `plan` raise ValueError with what was given and what is supported. `run` is the eager body of the op: public functions call
it, and tracing registers it with torch.

The two kinds of decode, dense_decode and sparse_decode, have CallSpec, check and plan. They share the body in decode, because
FlashMLA has one function for both, and because decode keeps checked calls. mqa_logits has the other way round two functions, and with
them run_rows and run_pages; index_write has run_keys and run_queries. indexer_topk plans nothing of its own: it calls mqa_logits and
topk_indices in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Planner(Protocol):
    """A module that checks and plans the calls of one op."""

    @property
    def CallSpec(self) -> type[tuple[Any, ...]]:  # noqa: N802  # a class of the module
        """NamedTuple of everything that decides on a launch, but for values and addresses."""
        ...

    @property
    def check(self) -> Callable[..., Any]:
        """Check each argument by itself and return the CallSpec."""
        ...

    @property
    def plan(self) -> Callable[..., Any]:
        """Return the LaunchPlan of a CallSpec."""
        ...


class Op(Planner, Protocol):
    """A module that also runs the calls."""

    @property
    def run(self) -> Callable[..., Any]:
        """Check, plan and launch a call, and return its results."""
        ...
