"""An architecture without kernels for a call refuses it by name; it does not end in missing artefacts."""

from __future__ import annotations

import re

import pytest

import cute_mla
from cute_mla.spec.arch import SM120
from cute_mla.spec.kernel_ops import ARCHS_OF
from tests.support.public_calls import calls_of, function_of, public_names

UNSERVED = {"sparse_prefill_backward", "head_sums", "indexer_backward", "dense_prefill_backward"}


def refusal(name: str, number: int) -> str:
    """Make a call of a public function on sm120. Return why it is refused, "" if it is not."""
    with cute_mla.simulate(SM120, sm_count=4, on_finding="collect"):
        try:
            function_of(name)(**calls_of(name)[number])
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", public_names())
def test_what_sm120_lacks_is_refused_by_name(name: str) -> None:
    with cute_mla.simulate(SM120):
        count = len(calls_of(name))
    for reason in {refusal(name, number) for number in range(count)} - {""}:
        assert re.search(r"sm120\b.*; supported", reason), reason


def test_training_is_refused() -> None:
    assert not any(SM120 in ARCHS_OF[op] for op in UNSERVED)
    for name in ("attention_head_sums", "indexer_scores", "indexer_backward", "flash_mla_sparse_bwd", "plan_sparse_backward"):
        assert re.fullmatch(r"the device is sm120; supported for \w+: sm90, sm100", refusal(name, 0))
