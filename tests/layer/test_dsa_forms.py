"""The choice between dense and sparse attention, at the number of keys where it changes."""

from __future__ import annotations

import pytest
import torch

from cute_mla.layer import DecodeRequests, MlaBatch, PrefillRequests, plan_batch, plan_sequences
from cute_mla.layer.forms import Form, Forms, Sparsity, decode_form, forms_of, prefill_form


@pytest.mark.parametrize(
    ("sparsity", "decode", "prefill"),
    [
        (Sparsity(None, True, False), ("dense", "dense"), ("dense", "dense")),
        (Sparsity(None, True, True), ("dense", "dense"), ("dense", "dense")),
        (Sparsity(16, True, False), ("dense", "chosen"), ("dense", "chosen")),
        (Sparsity(16, False, False), ("all", "chosen"), ("dense", "chosen")),
        (Sparsity(16, True, True), ("all", "chosen"), ("all", "chosen")),
        (Sparsity(16, True, False, 16), ("dense", "chosen"), ("dense", "masked")),
        (Sparsity(16, True, True, 16), ("all", "chosen"), ("all", "chosen")),
    ],
)
def test_up_to_topk_and_beyond(sparsity: Sparsity, decode: tuple[Form, Form], prefill: tuple[Form, Form]) -> None:
    assert (decode_form(16, sparsity), decode_form(17, sparsity)) == decode
    assert (prefill_form(requests(16), sparsity), prefill_form(requests(17), sparsity)) == prefill


@pytest.mark.parametrize(
    ("heads", "new", "cached", "form"),
    [
        (16, 16384, 0, "masked"), (32, 16384, 0, "masked"), (64, 16384, 0, "chosen"), (128, 16384, 0, "chosen"),
        (16, 51200, 0, "masked"), (16, 51202, 0, "chosen"), (64, 12800, 0, "masked"), (64, 12802, 0, "chosen"),
        (65, 16384, 0, "masked"), (128, 12800, 0, "masked"), (128, 12802, 0, "chosen"),
        (16, 2000, 24600, "masked"), (16, 2000, 24601, "chosen"), (1, 2000, 400_000, "masked"),
    ],
)  # fmt: skip
def test_a_mask_while_it_is_faster(heads: int, new: int, cached: int, form: Form) -> None:
    """One head over 200 times the keys that are chosen, a token's mean; sparse prefill takes 64 heads at a time."""
    assert prefill_form(requests(new, cached), Sparsity(2048, True, False, heads)) == form
    assert prefill_form(requests(new, cached), Sparsity(2048, True, False)) == "chosen"


def requests(new: int, cached: int = 0) -> PrefillRequests:
    """Return one prefill request."""
    pages = torch.zeros(1, -(-(new + cached) // 64), dtype=torch.int32)
    planned = plan_batch([new], [cached], pages, 64).prefill
    assert planned is not None
    return planned


def test_what_a_batch_says_of_its_keys() -> None:
    """Lengths that the host knows; else what the block table has room for; cached and new keys of prefill."""
    sparsity, table = Sparsity(70, True, False), torch.zeros(2, 2, dtype=torch.int32)
    assert forms_of(plan_batch([1, 69], [69, 1], table, 64, decodes=1), 64, sparsity) == Forms("dense", "dense")
    assert forms_of(plan_batch([1, 70], [70, 1], table, 64, decodes=1), 64, sparsity) == Forms("chosen", "chosen")
    assert forms_of(plan_sequences([70], "cpu"), 64, sparsity) == Forms(None, "dense")
    lengths, nobody = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for requests, form in ((DecodeRequests(table, lengths), "chosen"), (DecodeRequests(table, lengths, max_keys=9), "dense")):
        assert forms_of(MlaBatch(nobody, nobody, requests), 64, sparsity).decode == form
    assert forms_of(MlaBatch(nobody, nobody, DecodeRequests(table[:, :1], lengths)), 64, sparsity).decode == "dense"
    assert forms_of(MlaBatch(nobody, nobody, DecodeRequests(table[:, :1], lengths)), 128, sparsity).decode == "chosen"  # on two ranks
