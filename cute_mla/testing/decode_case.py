"""What the cases of all decode ops have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .case import BatchedCase, Given, given_fp32, given_out

Metadata = Literal["tensors", "object"]


@dataclass(frozen=True)
class DecodeCase(BatchedCase):
    """One call of a decode op, as far as all of them go.

    metadata: "tensors": form A of get_mla_metadata; "object": form B.
    """

    metadata: Metadata = "object"
    batch_invariant: bool = False


def given_results(case: DecodeCase, device: torch.device) -> dict[str, Given]:
    """out, and lse [b, h_q, s_q], if the call is given them."""
    if case.outputs == "allocated":
        return {}
    lse = given_fp32(case, (case.batch, case.h_q, case.s_q), 1, device)
    return {"out": given_out(case, device), "lse": lse}
