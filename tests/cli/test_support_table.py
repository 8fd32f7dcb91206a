"""The tables of what is supported: nothing that ships is left out, and options are what is_supported says."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cute_mla import is_supported
from cute_mla.aot_build.variants import closed_variants
from cute_mla.api.support import FEATURES
from cute_mla.cli import commands, support_table
from cute_mla.spec.arch import ARCHS

# Kernels that calls of other ops launch. Written out, so that a kernel which the table leaves out by mistake is noticed.
INSIDE_OTHERS = ("split_plan", "combine", "dense_prefill_dq", "row_statistics", "sparse_prefill_dq", "key_lists", "row_sums")


def test_every_kernel_that_is_called_by_itself_is_in_one_row() -> None:
    listed = dict(support_table.kernels())
    for arch in ARCHS.values():
        shown = {(what, dtype) for what, types in listed.items() for dtype in types.get(arch.name, "").split(", ") if dtype}
        named = {
            (support_table._what(variant), dtype)
            for variant in closed_variants(arch)
            if variant.op not in INSIDE_OTHERS
            for dtype in support_table._joined([variant.config.dtype]).split(", ")  # type: ignore[attr-defined]
        }
        assert shown == named
    assert listed["sparse decode, FP8 cache of 656 bytes a token"] == dict.fromkeys(ARCHS, "bf16")
    assert listed["dense decode, 16-bit cache of 576 columns"] == dict.fromkeys(ARCHS, "bf16, fp16")
    assert "sm120" not in listed["dense decode, 16-bit cache of 1,088 columns"]
    assert listed["dense decode, e4m3 cache and queries (type of out)"] == dict.fromkeys(ARCHS, "bf16")


def test_a_kernel_without_words_is_not_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {name: text for name, text in support_table._WORDS["sparse_decode"]["cache"].items() if name != "fp8_584"}
    monkeypatch.setitem(support_table._WORDS["sparse_decode"], "cache", words)  # the order of the words is that of the rows
    with pytest.raises(KeyError, match="fp8_584"):
        support_table.kernels()


def test_options_are_those_of_is_supported() -> None:
    listed = dict(support_table.options())
    assert tuple(listed) == FEATURES
    assert listed["attn_sink"] == {"dense_decode": "yes", "sparse_decode": "yes", "dense_prefill": "no", "sparse_prefill": "yes"}
    assert listed["h_q"]["dense_decode"] == "1 to 128"
    for feature in ("causal", "attn_sink", "extra_cache", "topk_length", "kv_offsets", "fp8_kvcache", "batch_invariant"):
        for op, answer in listed[feature].items():
            assert is_supported(op, "sm90", **{feature: True})[0] == (answer == "yes")


def test_the_command_prints_them_and_says_what_stands_behind_them() -> None:
    text = CliRunner().invoke(commands, ["show", "support"]).output
    assert text == support_table.markdown()
    found = json.loads(CliRunner().invoke(commands, ["show", "support", "--json"]).output)
    assert found["kernels"] == dict(support_table.kernels())
    assert found["options"] == dict(support_table.options())
    for arch in ARCHS.values():
        assert text.count(arch.proof.partition(arch.name)[2].strip()) == 1
        assert found["proof"][arch.name] == arch.proof
