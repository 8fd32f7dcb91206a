"""Cases of dK and dV of dense prefill on either architecture."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase

# One CTA walks items of several row tiles, of two and of none, more than there are stages; keys that no row sees.
WALK = DensePrefillBackwardCase(
    lengths=((130, 200), (0, 40), (5, 0), (64, 257), (3, 65)), group=2, causal=True, outputs="given", sm_count=1
)
WIDE = replace(WALK, d_qk=256)
FULL = replace(WALK, causal=False)
SAID = replace(WALK, lengths=((150, 70), (3, 65)), longest=128)
HEADS = replace(WALK, lengths=((70, 70), (3, 65)), h_kv=2, sm_count=4)  # a CTA for every item
ELEMENTS = replace(WALK, outputs="odd")
