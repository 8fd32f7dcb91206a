"""Sums in an order that the number of terms alone decides, by additions of whole tensors: the same bits on every device."""

from __future__ import annotations

import torch


def neighbour_sums(values: torch.Tensor) -> torch.Tensor:
    """Add up the first dimension: neighbours, then neighbouring sums, and so on; one without a neighbour waits. Of none the sum is 0.

    Each step is one addition per element, which every device rounds alike. torch.sum chooses its order by shape and device.
    """
    if not values.shape[0]:
        return values.new_zeros(values.shape[1:])
    while values.shape[0] > 1:
        paired = values.shape[0] // 2 * 2
        sums = values[0:paired:2] + values[1:paired:2]
        values = torch.cat((sums, values[paired:])) if paired < values.shape[0] else sums
    return values[0]
