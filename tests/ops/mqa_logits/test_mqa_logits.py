"""mqa_logits: the public calls, what they launch and compute. Numbers in brackets: groups of bugs of other libraries' indexers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.indexer import fp8_mqa_logits, get_paged_mqa_logits_metadata
from cute_mla.spec.arch import Arch
from cute_mla.spec.mqa_logits import COLUMNS, ROW_BYTES
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.mqa_logits.record import MQA_LOGITS, expected_logits
from tests.support.bench import Bench, expect
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import numbers

E4M3 = torch.float8_e4m3fn


def computed(arch: Arch, arguments: dict[str, Any], sm_count: int | None = None, **options: Any) -> torch.Tensor:
    """Return the logits on the simulated device, where one kernel was launched."""
    with cute_mla.simulate(arch.name, sm_count, **options) as device:
        logits: torch.Tensor = MQA_LOGITS.function(**arguments)
        assert device.launches == 1
    return logits


def with_rows(arguments: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Return the call of some query tokens of a call without pages."""
    return {**arguments, **{name: arguments[name][rows] for name in ("q", "weights", "ks", "ke")}}


ROWS = MqaLogitsCase(tokens=5, keys=300, heads=33, windows="random", values="normal")
PAGES = MqaLogitsCase(requests=3, tokens=2, keys=300, heads=33, page_size=64, lengths="edges", values="normal")
WHOLE = MqaLogitsCase(windows="whole")


@pytest.mark.parametrize("code", ["ptx", "sass"])
@pytest.mark.parametrize("case", [replace(ROWS, windows="edges", heads=64), replace(PAGES, heads=64)], ids=["rows", "pages"])
def test_agrees_with_the_formula(arch: Arch, case: MqaLogitsCase, code: str) -> None:
    """Normal values with scales of amax / 448, as in DeepGEMM's tests."""
    call = call_of(case)
    expect(case, call.tensors, (computed(arch, call, code=code),))


BY_RULE = {
    # Negative: none. More than the table or max_context_len holds: as many as these. About the borders of tiles.
    "lengths": replace(PAGES, requests=15, keys=257),
    "lengths of tokens": replace(PAGES, requests=8, keys=257, per_token=True),
    # A max_context_len within, at and beyond what the table holds.
    **{f"{columns} columns": replace(PAGES, columns=columns) for columns in (1, 64, 129, 299, 320, 700)},
    # With columns for more keys: no entry behind the row's last is read.
    "beyond the table": replace(PAGES, requests=6, columns=700),
    "beyond the table, of tokens": replace(PAGES, requests=6, columns=700, per_token=True),
    # NaN in page 0, in unused slots of used pages with their scales, and between pages; entries of the table that name no page.
    "bytes between pages": replace(PAGES, layout="strided"),
    # NaN keys and scales before, behind and between the windows, within the tiles that are loaded.
    "windows": replace(ROWS, windows="edges", tokens=10, keys=400),
}


@pytest.mark.parametrize("name", BY_RULE)
def test_what_is_seen_by_rule(bench: Bench, name: str) -> None:
    bench.judge(replace(BY_RULE[name], values="exact", heads=64))


@pytest.mark.parametrize("per_token", [False, True])
def test_lengths_are_clipped_to_what_the_table_holds(arch: Arch, per_token: bool) -> None:
    call, lengths = call_of(PAGES, requests=2, keys=320, columns=700, lengths="full", values="exact"), numbers(1 << 30, -5)
    call["context_lens"] = torch.stack([lengths - 1, lengths], dim=1) if per_token else lengths
    assert computed(arch, call).isfinite().sum(1).tolist() == [320 if per_token else 319, 320, 0, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_plateau_is_zero(arch: Arch, sign: int) -> None:
    """A logit without a positive head is exactly 0, with weights of either sign."""
    call = call_of(WHOLE, tokens=2, keys=200)
    keys = call["kv"][0].float().abs().neg()
    keys[::50] *= -1
    call |= {"q": call["q"].float().abs().to(E4M3), "kv": (keys.to(E4M3), call["kv"][1]), "weights": sign * (call["weights"].abs() + 1)}
    found = computed(arch, call)
    assert torch.equal(found, expected_logits(**call))
    assert (found == 0).sum(1).tolist() == [196, 196]


def test_nan_stays_where_it_is(arch: Arch) -> None:
    """NaN in a key or its scale reaches that key's logits, NaN in a token's queries or weights that token's, and no others."""
    call = call_of(WHOLE, tokens=4, keys=150)
    clean = expected_logits(**call)
    keys, scales = call["kv"]
    keys.view(torch.uint8)[7, 100], scales[70] = 0x7F, math.nan
    call["q"].view(torch.uint8)[1, 63, 0], call["weights"][2, 0] = 0xFF, math.nan
    found = computed(arch, call)
    touched = torch.zeros(4, 150, dtype=torch.bool)
    touched[:, [7, 70]] = True
    touched[1:3] = True
    assert torch.equal(found.masked_fill(touched, 0), clean.masked_fill(touched, 0))
    assert found[:, 70].isnan().all()
    assert found[2].isnan().all()


def test_a_list_of_keys_and_scales(arch: Arch) -> None:
    """Take kv as a list, as callers that unpack a tuple of tensors pass it."""
    call = call_of(WHOLE, tokens=1, heads=8, keys=5)
    assert torch.equal(computed(arch, {**call, "kv": list(call["kv"])}), expected_logits(**call))


def test_the_formula_by_hand() -> None:
    """One token of two heads and three keys: relu first, weights of either sign, the scale last, and nothing of a key that is not seen."""
    q, k = torch.zeros(1, 2, COLUMNS), torch.zeros(3, COLUMNS)
    q[0, 0, 0], q[0, 1, 1] = 2.0, 1.0
    k[0, :2], k[1, :2], k[2, :2] = torch.tensor([3.0, -1.0]), torch.tensor([-3.0, 4.0]), torch.tensor([math.nan, 1.0])
    arguments = (q.to(E4M3), (k.to(E4M3), torch.tensor([0.5, 2.0, 1.0])), torch.tensor([[10.0, -1.0]]), numbers(0), numbers(2))
    assert reference.fp8_mqa_logits(*arguments).tolist() == [[30.0, -8.0, -math.inf]]
    with cute_mla.simulate("sm90"):
        assert fp8_mqa_logits(*arguments).tolist() == [[30.0, -8.0, -math.inf]]


def test_pages_and_rows_have_the_same_bits(arch: Arch) -> None:
    """[9] Keys are the same, also on other pages."""
    paged = call_of(replace(PAGES, lengths="full"))
    logits = computed(arch, paged).unflatten(0, (3, 2))
    for request in range(3):
        kv = reference.indexed_keys(paged["cache"], paged["block_table"][request], 300)
        rows = slice(2 * request, 2 * request + 2)
        with cute_mla.simulate(arch.name):
            same = fp8_mqa_logits(paged["q"][request], kv, paged["weights"][rows], numbers(0, 0), numbers(299, 300))
        assert torch.equal(same, logits[request])
    copied = {**paged, "cache": paged["cache"].flip(0), "block_table": len(paged["cache"]) - 1 - paged["block_table"]}
    assert torch.equal(computed(arch, copied).unflatten(0, (3, 2)), logits)


@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_bits_depend_on_token_and_key_alone(arch: Arch, schedule: str) -> None:
    """[9] Alone and among others, on one SM and on many, in part of the keys."""
    arguments = call_of(replace(ROWS, windows="whole", keys=700))
    logits = computed(arch, arguments)
    assert torch.equal(computed(arch, arguments, 1, schedule=schedule), logits)
    for row in (0, 3):
        assert torch.equal(computed(arch, with_rows(arguments, slice(row, row + 1))), logits[row : row + 1])
    keys, scales = arguments["kv"]
    later = {**arguments, "kv": (keys[131:], scales[131:]), "ke": arguments["ke"] - 131}
    assert torch.equal(computed(arch, later), logits[:, 131:])


@pytest.mark.parametrize("case", [replace(ROWS, clean=False), replace(PAGES, clean=False)], ids=["rows", "pages"])
def test_unseen_columns_are_not_written_unless_clean(arch: Arch, case: MqaLogitsCase) -> None:
    arguments = call_of(replace(case, values="exact"))
    kept = torch.full(case.shape, 7.0)
    wanted = expected_logits(**arguments)
    with cute_mla.simulate(arch.name):
        assert arguments.run(out=kept) is kept
    assert torch.equal(kept, torch.where(wanted.isnan(), 7.0, wanted))
    cleaned = computed(arch, {**arguments, "clean_logits": True})
    assert torch.equal(cleaned, torch.where(wanted.isnan(), -math.inf, wanted))


def test_relative_columns(arch: Arch) -> None:
    """Column j is key ks + j; keys from ks + max_seqlen_k on have none, and columns behind ke are not written."""
    arguments = {**call_of(replace(ROWS, windows="edges", values="exact", tokens=10)), "clean_logits": False, "max_seqlen_k": 70}
    out = torch.full((10, 70), 7.0)
    computed(arch, {**arguments, "out": out})
    keys = len(arguments["kv"][0])
    whole = expected_logits(**{**arguments, "max_seqlen_k": 0})
    for row, (first, end) in enumerate(zip(arguments["ks"].clamp(0, keys).tolist(), arguments["ke"].clamp(0, keys).tolist(), strict=True)):
        count = min(max(end - first, 0), 70)
        assert torch.equal(out[row, :count], whole[row, first : first + count])
        assert (out[row, count:] == 7.0).all()


@pytest.mark.parametrize("tokens", range(1, 9))
def test_tokens_of_a_request_see_one_key_more_each(arch: Arch, tokens: int) -> None:
    """[4] Lengths below the number of tokens, 0 and less, and at the borders of pages and tiles."""
    case = replace(PAGES, requests=4, tokens=tokens, values="exact", heads=8, keys=140)
    arguments = call_of(case)
    lengths = numbers(tokens - 1, -3, 129, 128)
    arguments |= {"context_lens": lengths, "cache": arguments["cache"].clone().fill_(0x30)}
    arguments["block_table"] = torch.arange(12, dtype=torch.int32).view(4, 3) % len(arguments["cache"])
    logits = computed(arch, arguments).unflatten(0, (4, tokens))
    for request, length in enumerate(lengths.tolist()):
        for token in range(tokens):
            seen = max(max(length, 0) - tokens + 1 + token, 0)
            assert logits[request, token].isfinite().tolist() == [True] * seen + [False] * (140 - seen)
    each = (lengths.clamp(0, 140).unsqueeze(1) - torch.arange(tokens - 1, -1, -1, dtype=torch.int32)).contiguous()
    assert torch.equal(computed(arch, {**arguments, "context_lens": each}).unflatten(0, (4, tokens)), logits)


def test_stale_metadata_does_no_harm(arch: Arch) -> None:
    """[8] Metadata of other lengths, of any contents, and none: the same launch."""
    arguments = call_of(replace(PAGES, values="exact"))
    made = get_paged_mqa_logits_metadata(arguments["context_lens"], 64, 132)
    assert (made.shape, made.dtype, made.any().item()) == ((133, 2), torch.int32, False)
    assert get_paged_mqa_logits_metadata(torch.zeros(2, 3, dtype=torch.int32), 16, 1).shape == (2, 2)
    wanted = expected_logits(**arguments)
    for metadata in (None, made, torch.full_like(made, (1 << 31) - 1)):
        assert torch.equal(computed(arch, {**arguments, "metadata": metadata}), wanted)


def test_pages_outside_the_cache_are_zeros_and_a_finding(arch: Arch) -> None:
    arguments = call_of(replace(PAGES, broken=True, lengths="full", values="exact"))
    with cute_mla.simulate(arch.name, on_finding="collect") as device:
        logits = arguments.run()
    assert torch.equal(logits, expected_logits(**arguments))
    assert (logits[1, 64:128] == 0).all()
    assert [finding.kind for finding in device.findings] == ["block_table"]
    assert "block_table[0, 1] is" in str(device.findings[0])


def test_scales_end_with_their_memory(arch: Arch) -> None:
    """[6] No scale is read beyond the last key, whose number is no multiple of 4; nor does the first lie at a multiple of 16 bytes."""
    arguments = call_of(replace(ROWS, keys=67, windows="whole", values="exact"))
    keys, scales = arguments["kv"]
    placed = torch.full((68,), math.nan)[1:].copy_(scales)
    assert torch.equal(computed(arch, {**arguments, "kv": (keys, placed)}), expected_logits(**arguments))


def test_what_is_launched(arch: Arch) -> None:
    arguments = call_of(PAGES)
    with RecordingDevice(arch, 132).active() as device:
        logits = arguments.run()
        call_of(replace(ROWS, heads=8)).run()
    paged, rows = device.launches
    assert (paged.kernel, paged.pdl) == (f"mqa_logits_{arch.name}_e4m3_pages_h64", True)
    assert (rows.kernel, rows.args["block_table"]) == (f"mqa_logits_{arch.name}_e4m3_rows_h32", None)
    assert (logits.shape, logits.stride(), paged.args["logits_stride_token"]) == ((6, 300), (512, 1), 512)
    expected = {"tokens": 6, "heads": 33, "tokens_per_request": 2, "keys": 300, "columns": 300, "page_size": 64, "clean": 1}
    assert {name: paged.args[name] for name in expected} == expected
    q_map, k_map = paged.args["q_map"], paged.args["k_map"]
    assert (q_map.dims, q_map.strides, q_map.box) == ((128, 33, 6), (128, 33 * 128), (128, 64, 2))
    assert (k_map.dims, k_map.strides, k_map.box) == ((128, 64, len(arguments["cache"])), (128, 64 * ROW_BYTES), (128, 64, 1))
    assert paged.args["scales"].data_ptr() == arguments["cache"].data_ptr() + 64 * 128
