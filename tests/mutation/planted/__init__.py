"""Bugs planted in every family of kernels: not only synchronisation, but masks, scales, columns, orders.

A module declares the SUITE of its name, or several SUITES by name. The other modules hold what suites share.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from tests.mutation.planting import Suite


def _suites(module: str) -> Mapping[str, Suite]:
    """Return the suites of a module, by name."""
    found = vars(import_module(f"{__name__}.{module}"))
    return {module: found["SUITE"]} if "SUITE" in found else found.get("SUITES", {})


SUITES: Mapping[str, Suite] = {name: suite for info in iter_modules(__path__) for name, suite in _suites(info.name).items()}
