"""Cases for dense decode on Blackwell: one pair of CTAs."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase

# Three requests: enough tiles to go round every ring, keys past the end, masked rows.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True, sm_count=2)
RISING = DenseDecodeCase(batch=2, lengths=(400, 200), h_q=64, values="rising", sm_count=2)  # O is rescaled again and again
BROKEN = replace(WALK, lengths=(64, 180, 640), broken=True)  # first and later pages of requests are below 0
GAPS = replace(WALK, batch=8, lengths=(60, 0, 60, 0, 0, 60, 0, 60))  # a role with nothing to do may run ahead
MANY = replace(WALK, batch=7, lengths=(70, 10, 130, 64, 20, 70, 70))  # more work tiles than the scout keeps records
