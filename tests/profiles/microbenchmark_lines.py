"""Lines as the microbenchmarks print them."""

from __future__ import annotations

import json


def line(name: str, value: float | None, detail: str = "") -> str:
    """Return one line."""
    return json.dumps({"name": name, "value": value, "unit": "clocks", "detail": detail})


def lines(gpu: str = "NVIDIA H200", date: str = "2026-12-01", **measured: float) -> list[str]:
    """Return what a run of microbenchmarks prints."""
    return [line("device", 132, f"{gpu}; {date}"), *(line(name, value) for name, value in measured.items())]
