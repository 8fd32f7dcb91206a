"""Attention sinks, tree masks and windows of dense decode, on the simulated device. Bad arguments are in test_errors.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.spec.dense_decode import FP8_CACHE
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase, make_dense_decode_tensors
from tests.support.bench import Bench, identical
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import ints

# The kernels for few heads have neither trees nor windows.
SMALL = DenseDecodeCase(batch=2, s_q=3, lengths=(150, 2), h_q=4, few_heads=False, sm_count=2)


def lse_of_equal_scores(bench: Bench, case: DenseDecodeCase) -> torch.Tensor:
    """Return the number of keys that each token sees, int64 [batch, s_q]: exp(lse) of queries of zeros, 0 for a row without a key."""
    tensors = make_dense_decode_tensors(replace(case, empty_lse=-math.inf))
    tensors.q.zero_()
    _, lse = bench.run(replace(case, empty_lse=-math.inf), tensors)
    return lse[:, 0].exp().round().long()


def test_window_counts_a_token_s_own_key(bench: Bench) -> None:
    case = replace(SMALL, causal=True, window=5)
    assert lse_of_equal_scores(bench, case).tolist() == [[5, 5, 5], [0, 1, 2]]
    assert lse_of_equal_scores(bench, replace(case, causal=False)).tolist() == [[7, 6, 5], [2, 2, 2]]


def test_first_keys_are_seen_in_spite_of_a_window_but_not_of_causal(bench: Bench) -> None:
    case = replace(SMALL, causal=True, window=5, window_sink=4)
    assert lse_of_equal_scores(bench, case).tolist() == [[9, 9, 9], [0, 1, 2]]


@pytest.mark.parametrize("sm_count", [2, 12])
def test_tiles_between_first_keys_and_windows_are_skipped(bench: Bench, sm_count: int) -> None:
    case = replace(SMALL, lengths=(1000, 300), causal=True, window=40, window_sink=70, page_size=32, sm_count=sm_count)
    assert lse_of_equal_scores(bench, case).tolist() == [[110] * 3] * 2
    bench.judge(case)


def test_a_window_as_long_as_the_request_hides_nothing(bench: Bench) -> None:
    tensors = make_dense_decode_tensors(replace(SMALL, causal=True))
    assert identical(bench.run(replace(SMALL, causal=True, window=150), tensors), bench.run(replace(SMALL, causal=True), tensors))


def test_a_tree_that_is_a_chain_is_causal(bench: Bench) -> None:
    chain = replace(make_dense_decode_tensors(SMALL), tree_mask=torch.tensor([1, 3, 7], dtype=torch.int32).view(1, 3, 1).expand(2, 3, 1))
    expected = bench.run(replace(SMALL, causal=True), replace(chain, tree_mask=None))
    for causal in (False, True):
        assert identical(bench.run(replace(SMALL, causal=causal), chain), expected)


def test_bits_behind_the_new_tokens_count_for_nothing(bench: Bench) -> None:
    tensors = make_dense_decode_tensors(replace(SMALL, tree="drawn"))
    assert tensors.tree_mask is not None
    expected = bench.run(SMALL, tensors)
    assert identical(bench.run(SMALL, replace(tensors, tree_mask=tensors.tree_mask ^ -8)), expected)


@pytest.mark.parametrize("sm_count", [2, 12])
def test_sinks_scale_out_once_and_leave_lse(bench: Bench, sm_count: int) -> None:
    case = replace(SMALL, lengths=(500, 70), sm_count=sm_count)
    tensors = make_dense_decode_tensors(case)
    out, lse = bench.run(case, tensors)
    sinks = torch.tensor([0.0, 3.0, -math.inf, math.inf])
    scaled, same = bench.run(case, replace(tensors, attn_sink=sinks))
    assert torch.equal(same, lse)
    share = torch.sigmoid(lse - sinks[:, None]).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(scaled.float(), out.float() * share, rtol=2e-2, atol=1e-3)
    assert (scaled[:, :, 3] == 0).all()


@pytest.mark.parametrize("window", [None, 100])
def test_a_plan_of_a_window_is_that_of_shorter_requests(device: RecordingDevice, window: int | None) -> None:
    cute_mla.get_mla_metadata(ints(2), 128, 1, 64, window=window, window_sink=65 if window else 0)
    (plan,) = device.launches
    assert (plan.args["reach"], plan.args["sink_tiles"]) == ((1 << 31) - 1, 0) if window is None else (101, 2)


def test_a_plan_of_a_window_needs_the_query_heads(device: RecordingDevice) -> None:
    with pytest.raises(ValueError, match="window is 100 with num_heads_q None and topk None; supported: with num_heads_q, without topk"):
        cute_mla.get_mla_metadata(ints(2), 128, 1, window=100)
    with pytest.raises(ValueError, match="window is 100 with num_heads_q 64 and topk 64"):
        cute_mla.get_mla_metadata(ints(2), 128, 1, 64, topk=64, window=100)


def test_a_schedule_serves_one_window(device: RecordingDevice) -> None:
    call = call_of("dense")
    call.run(window=100)
    with pytest.raises(ValueError, match="planned for other shapes: window None after 100"):
        call.run()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("given", [{"tree_mask": ints(2, 1, 1)}, {"window": 100}], ids=str)
def test_trees_and_windows_over_an_e4m3_cache_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} is given with a k_cache of torch.float8_e4m3fn: not supported; supported: with a 16-bit"):
        call_of("dense", operands=FP8_CACHE).run(**given)


def test_a_window_over_packed_tokens_is_causal(device: RecordingDevice) -> None:
    cute_mla.get_mla_metadata(ints(2), 128, 1, 64, cu_seqlens_q=ints(3), total_q=4, window=100)
    assert device.launches[0].args["reach"] == 101  # of units of two tokens
    call = call_of("dense")
    packed = {"q": call["q"].flatten(0, 1), "cu_seqlens_q": ints(3), "max_seqlen_q": 1}
    with pytest.raises(ValueError, match="window is 100 with cu_seqlens_q and causal False; supported: None, or causal True"):
        call.run(**packed, window=100)
