"""Functions that launch nothing: questions, sizes, the simulated device itself, caches in plain torch, and the layer's plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

import cute_mla
from cute_mla.cache import dequantise_cache, empty_cache, quantise_cache
from cute_mla.layer import MlaBatch, MlaConfig, YarnScaling, plan_batch
from cute_mla.spec.arch import ALIASES, ARCHS, Arch
from cute_mla.spec.cache_format import CacheFormat
from cute_mla.spec.cache_rows import KNOWN
from cute_mla.testing.runner import SCHEDULES
from tests.fuzz.calls import BatchCase, CacheCase, PlainCase, Setting
from tests.fuzz.contract import Contract, is_optional
from tests.fuzz.scalars import is_flag, is_integer, is_one_of
from tests.fuzz.subjects import Arguments, Subject, Verify

OPS = ("dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill")
_VERIFIED_BATCH = 256
_MOST_KEYS = (1 << 31) - 64


def _plain(case: PlainCase) -> Arguments:
    return dict(case.arguments)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _finite(value: Any) -> float:
    """Return the number as a float; NaN if it is none, or too large for one."""
    try:
        return float(value) if _is_number(value) else math.nan
    except OverflowError:
        return math.nan


# ------------------------------------------------------------ workspace_size


def _workspace_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(op=is_one_of(*OPS), batch_invariant=is_flag)
    if c.faults:
        return c.faults
    op = c.get("op")
    for name in ("batch", "s_q"):
        c.require(is_integer(c.get(name)) and c.get(name) >= 0, name)
    h_q, h_kv = c.get("h_q"), arguments.get("h_kv", 1)
    whole = c.require(is_integer(h_q) and 1 <= h_q <= ((1 << 31) - 1 if op == "dense_prefill" else 128), "h_q")
    if c.require(is_integer(h_kv) and h_kv >= 1, "h_kv") and whole:
        c.require(h_q % h_kv == 0 and (h_kv == 1 or str(op).startswith("dense")), "h_kv", "h_q")
    keys, topk, invariant = c.get("max_cache_seqlen"), c.get("topk"), c.get("batch_invariant")
    for name, value in (("max_cache_seqlen", keys), ("topk", topk)):
        c.require(value is None or (is_integer(value) and value >= 0), name)
    c.require((keys is not None) == bool(invariant) if op == "dense_decode" else keys is None, "max_cache_seqlen", "batch_invariant")
    c.require(topk is None or str(op).startswith("sparse"), "topk")
    c.require(op != "sparse_decode" or not invariant or topk is not None, "topk", "batch_invariant")
    c.require(arguments.get("device") is None or _is_cpu(arguments["device"]), "device", "tensors")
    return c.faults


def _is_cpu(device: Any) -> bool:
    return device == "cpu" if isinstance(device, str) else isinstance(device, torch.device) and device.type == "cpu"


def _expect_workspace(arguments: Arguments, setting: Setting) -> Verify:
    """Expect the bytes that a call of these shapes asks for."""
    op, batch, s_q = (arguments[name] for name in ("op", "batch", "s_q"))
    keys = arguments.get("max_cache_seqlen" if op == "dense_decode" else "topk") or 0
    decodes = op in ("dense_decode", "sparse_decode")
    unserved = setting.arch == "sm120" and arguments.get("h_kv", 1) > 1  # by dense decode, whose calls are refused
    if decodes and (unserved or batch > _VERIFIED_BATCH or s_q > _VERIFIED_BATCH or keys > 1 << 24 or keys % 16):
        return lambda size: "" if isinstance(size, int) and size >= 0 and size % 4 == 0 else f"{size!r} returned"
    needed = _asked_for(arguments, keys) if decodes and batch and s_q else 0
    return lambda size: "" if size == needed else f"{size!r} returned, a call asks for {needed}"


def _asked_for(arguments: Arguments, keys: int) -> int:
    """Return the workspace, in bytes, that a call without one asks for in its error."""
    batch, s_q, h_q, h_kv = (int(arguments.get(name, 1)) for name in ("batch", "s_q", "h_q", "h_kv"))
    q = torch.zeros(576, dtype=torch.bfloat16).expand(batch, s_q, h_q, 576)
    cache = torch.zeros(2, 16, h_kv, 576, dtype=torch.bfloat16)
    plan = cute_mla.get_mla_metadata()
    options: dict[str, Any] = {"workspace": torch.zeros(0, dtype=torch.uint8), "batch_invariant": bool(arguments.get("batch_invariant"))}
    try:
        if arguments["op"] == "dense_decode":
            table, lengths = torch.zeros(1, keys // 16, dtype=torch.int32).expand(batch, -1), torch.zeros(batch, dtype=torch.int32)
            cute_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan, **options)
        else:
            indices = torch.zeros(1, 1, keys, dtype=torch.int32).expand(batch, s_q, keys)
            options["topk_length"] = torch.zeros(batch, dtype=torch.int32)  # without lengths, a call that needs no cuts asks for nothing
            cute_mla.flash_mla_with_kvcache(q, cache, None, None, 512, *plan, indices=indices, **options)
    except ValueError as error:
        return int(str(error).split("at least ")[1].split(",")[0])
    return 0


# ------------------------------------------------------------ is_supported, simulate

_FEATURES = (
    *("dtype", "h_q", "h_kv", "s_q", "head_dim", "head_dim_v", "page_size", "causal", "batch_invariant", "fp8_kvcache"),
    *("attn_sink", "extra_cache", "topk_length", "topk", "indexer_topk", "kv_offsets"),
)


def _supported_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(op=is_one_of(*OPS), arch=is_one_of(*ARCHS, *ALIASES))
    return c.faults


def _feature_is_possible(op: str, name: str, value: Any) -> bool:
    """Return whether any call of the op has this value."""
    dense, decode = op.startswith("dense"), op.endswith("decode")
    match name:
        case "dtype":
            known = {"dense_decode": ("bf16", "fp16", "e4m3"), "dense_prefill": ("bf16", "fp16")}.get(op, ("bf16",))
            types = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
            return (isinstance(value, str) and value in known) or (isinstance(value, torch.dtype) and value in types[: len(known)])
        case "h_q":
            return is_integer(value) and 1 <= value <= ((1 << 31) - 1 if op == "dense_prefill" else 128)
        case "h_kv":
            return is_integer(value) and 1 <= value <= ((1 << 31) - 1 if op == "dense_prefill" else 128 if dense else 1)
        case "s_q":
            limit = {"dense_decode": 1 << 24, "sparse_decode": 65_535}.get(op, (1 << 31) - 1)
            return is_integer(value) and 1 <= value <= limit
        case "head_dim":
            known_sizes = {"dense_decode": (576, 512, 320, 1088), "dense_prefill": (192, 128, 256)}.get(op, (576, 512))
            return is_integer(value) and value in known_sizes
        case "head_dim_v":
            return is_integer(value) and value in {"dense_prefill": (128, 256), "dense_decode": (512, 256, 1024)}.get(op, (512,))
        case "page_size":
            if not decode:
                return value is None
            return is_integer(value) and 1 <= value <= _MOST_KEYS and (not dense or value in (16, 32) or value % 64 == 0)
        case "indexer_topk":
            return is_integer(value) and 0 <= value <= (_MOST_KEYS if op == "sparse_prefill" else 0)
        case "topk":
            return value is None if dense else is_integer(value) and 0 <= value <= _MOST_KEYS
        case "batch_invariant":
            return is_flag(value)
        case "causal":
            allowed = dense
        case "fp8_kvcache":
            allowed = decode
        case "attn_sink":
            allowed = op != "dense_prefill"
        case "topk_length":
            allowed = not dense
        case "extra_cache":
            allowed = op == "sparse_decode"
        case _:
            allowed = op == "sparse_prefill"
    return is_flag(value) and (allowed or not value)


def _expect_supported(arguments: Arguments, setting: Setting) -> Verify:
    features = {name: value for name, value in arguments.items() if name not in ("op", "arch")}
    op = arguments["op"]
    possible = all(_feature_is_possible(op, name, value) for name, value in features.items())
    together = possible and _possible_together(op, features) and _possible_on(arguments["arch"], op, features)

    def verify(answer: Any) -> str:
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool) and isinstance(answer[1], str)):
            return f"{answer!r} returned"
        if answer[0] != together:
            return f"{answer} returned for {features}"
        return "" if answer[0] or "supported" in answer[1] else f"no reason in {answer}"

    return verify


def _possible_together(op: str, features: Mapping[str, Any]) -> bool:
    fp8, dtype = features.get("fp8_kvcache"), str(features.get("dtype")).removeprefix("torch.")
    if features.get("h_q", 128) % features.get("h_kv", 1) and "h_q" in features:
        return False
    if "topk" in features and features.get("indexer_topk", 0) > (features["topk"] or 0):
        return False
    columns, columns_v, half = features.get("head_dim"), features.get("head_dim_v"), dtype in ("fp16", "float16")
    if op == "dense_prefill":
        fitting = columns is None or columns_v in (None, 256 if columns == 256 else 128)
        return fitting and not (half and 256 in (columns, columns_v))
    if op == "dense_decode":
        e4m3 = dtype in ("e4m3", "float8_e4m3fn")
        fitting = columns is None or columns_v in (None, {320: 256, 1088: 1024}.get(columns, 512))
        other = columns not in (None, 576)
        return (
            fitting
            and not (other and (half or fp8 or e4m3))
            and not (half and columns_v in (256, 1024))
            and not (fp8 and features.get("h_kv", 1) != 1)
            and not (fp8 is not None and not fp8 and e4m3)
        )
    if op == "sparse_decode":
        return not (fp8 and half) and not (fp8 is not None and not fp8 and features.get("head_dim") == 512)
    return True


def _possible_on(arch: str, op: str, features: Mapping[str, Any]) -> bool:
    """Return whether an architecture serves features that some architecture serves."""
    if ALIASES.get(arch, arch) != "sm120":
        return True
    if op == "dense_decode":
        rows = features.get("head_dim", 576), features.get("head_dim_v", 512), features.get("h_kv", 1)
        return rows == (576, 512, 1)
    return op in ("dense_prefill", "sparse_decode", "sparse_prefill")


_NEEDED = {"dense_decode": ("head_dim",), "sparse_decode": ("h_q",), "dense_prefill": ("head_dim",), "sparse_prefill": ("head_dim", "h_q")}


def _fingerprint_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(op=is_one_of(*OPS), arch=is_one_of(*ARCHS, *ALIASES), few_heads=is_flag)
    if c.faults:
        return c.faults
    op, features = c.get("op"), {name: value for name, value in arguments.items() if name not in ("op", "arch", "few_heads")}
    for name, value in features.items():
        c.require(_feature_is_possible(op, name, value), name, name.replace("_", " "))  # "page size" in its error
    if c.faults or not c.require(_possible_together(op, features), *features):
        return c.faults
    if not c.require(_possible_on(c.get("arch"), op, features), "arch", *features):
        return c.faults
    c.require(features.get("batch_invariant") is not False, "batch_invariant")
    for name in _NEEDED[op]:
        c.require(name in features, name)
    if op == "sparse_decode":  # calls here name no formats
        c.require(not features.get("fp8_kvcache") and features.get("head_dim") == 576, "kv_format")
        c.require(not features.get("extra_cache"), "extra_kv_format")
    return c.faults


def _expect_fingerprint(arguments: Arguments, setting: Setting) -> Verify:
    names = {arguments["op"], *(("sparse_attention",) if arguments["op"].startswith("sparse") else ())}  # bits of prefill in decode
    return lambda found: "" if len(found.order) == 16 and any(f'"{name}"' in found.terms for name in names) else f"{found}"


def _simulate_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(
        arch=lambda value: isinstance(value, Arch) or (isinstance(value, str) and value in ARCHS),
        sm_count=is_optional(lambda value: is_integer(value) and value >= 1),
        schedule=is_one_of(*SCHEDULES),
        seed=is_integer,
        on_finding=is_one_of("raise", "collect"),
    )
    return c.faults


def _simulated(**arguments: Any) -> Any:
    with cute_mla.simulate(**arguments) as device:
        return device


def _expect_simulated(arguments: Arguments, setting: Setting) -> Verify:
    count = arguments.get("sm_count")

    def verify(device: Any) -> str:
        wrong = device.findings or device.launches or (count is not None and device.sm_count != count)
        return f"a device of {device.sm_count} SMs" if wrong else ""

    return verify


# ------------------------------------------------------------ caches in plain torch


def _types(layout: CacheFormat) -> tuple[torch.dtype, ...]:
    """Types of a cache, the default one first."""
    if not layout.quantised:
        return torch.bfloat16, torch.float16
    return (torch.uint8, torch.int8, torch.float8_e4m3fn) if layout.groups else (torch.float8_e4m3fn,)


def _columns(layout: CacheFormat) -> int:
    return layout.page_bytes(1) // _types(layout)[0].itemsize


def _keys(case: CacheCase) -> tuple[Tensor, Tensor | None]:
    """kv, and a cache for it if one is given."""
    layout = KNOWN[case.cache_format]
    kv = torch.randn(case.pages, case.page_size, 1, layout.d_qk, generator=torch.Generator().manual_seed(case.seed))
    if not case.given:
        return kv, None
    stride = layout.page_bytes(case.page_size) + case.padding * _types(layout)[0].itemsize
    return kv, empty_cache(case.cache_format, case.pages, case.page_size, page_stride=stride)


def _quantise_arguments(case: CacheCase) -> Arguments:
    kv, out = _keys(case)
    return {"kv": kv, "cache_format": case.cache_format, "power_of_two": case.power_of_two, "out": out}


def _quantise_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(power_of_two=is_flag)
    if not c.require(is_one_of(*KNOWN)(arguments["cache_format"]), "cache_format"):
        return c.faults
    layout = KNOWN[arguments["cache_format"]]
    flag = arguments["power_of_two"]
    c.require(not is_flag(flag) or not flag or (layout.groups > 0 and layout.code == "e4m3"), "power_of_two")
    kv = c.tensor("kv")
    if not c.shaped("kv", kv, None, None, 1, layout.d_qk, beside="cache_format") or kv is None:
        return c.faults
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
    c.require(kv.dtype in floats and kv.device.type != "meta", "kv")
    out = c.tensor("out", *_types(layout), optional=True)
    c.require(out is not None or kv.shape[0] * layout.page_bytes(kv.shape[1]) < 1 << 40, "kv")
    if out is not None and c.shaped("out", out, *kv.shape[:2], 1, _columns(layout), beside="kv"):
        _check_pages(c, "out", out, layout)
        c.require(out.device == kv.device, "out", "kv")
        c.output("out", tuple(out.shape), _types(layout))
        c.apart(("out",))
    return c.faults


def _check_pages(c: Contract, name: str, cache: Tensor, layout: CacheFormat) -> None:
    if layout.groups:
        c.last_contiguous(name, cache)
        c.require(layout.scales_inside or cache.shape[1] <= 1 or cache.stride(1) == cache.shape[3], name)


def _expect_quantised(arguments: Arguments, setting: Setting) -> Verify:
    kv, cache_format = arguments["kv"].float(), arguments["cache_format"]
    relative, absolute = (14, 0.02) if KNOWN[cache_format].code == "e4m3" else (4, 0.2)  # e2m1 has a bit of mantissa

    def verify(cache: Any) -> str:
        if arguments["out"] is not None and cache is not arguments["out"]:
            return "the cache returned is not the one given"
        error = (dequantise_cache(cache, cache_format) - kv).abs()
        return "" if not error.numel() or float((error - kv.abs() / relative).max()) < absolute else f"off by {float(error.max())}"

    return verify


def _dequantise_arguments(case: CacheCase) -> Arguments:
    kv, out = _keys(case)
    return {"cache": quantise_cache(kv, case.cache_format, out=out), "cache_format": case.cache_format}


def _dequantise_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    if not c.require(is_one_of(*KNOWN)(arguments["cache_format"]), "cache_format"):
        return c.faults
    layout = KNOWN[arguments["cache_format"]]
    cache = c.tensor("cache", *_types(layout))
    if c.shaped("cache", cache, None, None, 1, _columns(layout), beside="cache_format") and cache is not None:
        _check_pages(c, "cache", cache, layout)
        c.require(cache.device.type != "meta", "cache")
    return c.faults


def _expect_dequantised(arguments: Arguments, setting: Setting) -> Verify:
    shape = [*arguments["cache"].shape[:3], KNOWN[arguments["cache_format"]].d_qk]
    return lambda kv: "" if list(kv.shape) == shape and kv.dtype == torch.float32 else f"{kv.dtype} {list(kv.shape)}"


def _empty_cache_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(fill=lambda value: is_integer(value) and 0 <= value <= 255)
    small = True
    for name in ("pages", "page_size"):
        small &= c.require(is_integer(c.get(name)) and c.get(name) >= 0, name)
    stride = c.get("page_stride")
    small &= c.require(stride is None or is_integer(stride), "page_stride")
    if c.require(is_one_of(*KNOWN)(c.get("cache_format")), "cache_format") and small:
        layout = KNOWN[arguments["cache_format"]]
        least = layout.page_bytes(arguments["page_size"])
        step = least if stride is None else stride
        c.require(step >= least and step % _types(layout)[0].itemsize == 0, "page_stride")
        c.require(max(arguments["pages"], 1) * max(step, 1) < 1 << 40, "pages", "page_size", "page_stride")
    return c.faults


def _expect_empty_cache(arguments: Arguments, setting: Setting) -> Verify:
    layout = KNOWN[arguments["cache_format"]]
    shape, dtype = [arguments["pages"], arguments["page_size"], 1, _columns(layout)], _types(layout)[0]

    def verify(cache: Any) -> str:
        right = list(cache.shape) == shape and cache.dtype == dtype and (cache.view(torch.uint8) == arguments.get("fill", 0)).all()
        return "" if right else f"{cache.dtype} {list(cache.shape)} returned"

    return verify


# ------------------------------------------------------------ the layer


def _positive(value: Any) -> bool:
    return 0 < _finite(value) < math.inf


def _config_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    sizes = ("hidden_size", "num_attention_heads")
    for name in sizes:
        c.require(is_integer(c.get(name)) and c.get(name) >= 1, name)
    c.numbers(
        q_lora_rank=is_optional(lambda value: is_integer(value) and value >= 1),
        rms_norm_eps=_positive,
        rope_theta=_positive,
        rope_interleave=is_flag,
        mla_use_nope=is_flag,
        mla_scale_q_lora=is_flag,
        mla_scale_kv_lora=is_flag,
        attention_sinks=is_flag,
        softmax_scaling=is_flag,
        learned_frequencies=is_flag,
        rotary_norm=is_flag,
        latents=is_one_of("own", "lent", "borrowed"),
        output_gate=is_optional(is_one_of("head", "column")),
    )
    normed, interleaved = arguments.get("rotary_norm", False), arguments.get("rope_interleave", True)
    c.require(not (is_flag(normed) and normed) or bool(interleaved), "rotary_norm", "rope_interleave")
    scales = arguments.get("mla_scale_q_lora", False)
    c.require(not (is_flag(scales) and scales) or c.get("q_lora_rank") is not None, "mla_scale_q_lora")
    return c.faults


def _expect_config(arguments: Arguments, setting: Setting) -> Verify:
    return lambda config: "" if config.softmax_scale == 192**-0.5 and config.query_columns == 192 else f"{config}"


def _yarn_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    for name in ("factor", "original_max_position_embeddings"):
        c.require(_positive(c.get(name)), name)
    for name in ("mscale", "mscale_all_dim"):
        c.require(name not in arguments or 0 <= _finite(arguments[name]) < math.inf, name)
    fast = arguments.get("beta_fast", 32.0)
    c.require(_positive(fast) and fast > 1, "beta_fast")
    return c.faults


def _expect_yarn(arguments: Arguments, setting: Setting) -> Verify:
    return lambda yarn: "" if 0 < yarn.softmax_scale < math.inf and 0 < yarn.rotary_scale < math.inf else f"{yarn}"


def _batch_arguments(case: BatchCase) -> Arguments:
    new, cached = [new for new, _ in case.lengths], [cached for _, cached in case.lengths]
    pages = max(((a + b + case.page_size - 1) // case.page_size for a, b in case.lengths), default=0)
    table = torch.randperm(len(new) * pages, generator=torch.Generator().manual_seed(len(new)), dtype=torch.int32).view(len(new), pages)
    slots = torch.arange(sum(new)) if case.slots_given else None
    return {
        "query_lengths": new,
        "context_lengths": cached,
        "block_table": table,
        "page_size": case.page_size,
        "decodes": case.decodes,
        "slot_mapping": slots,
        "chunk_tokens": case.chunk_tokens,
    }


def _batch_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    lengths: list[list[int]] = []
    for name in ("query_lengths", "context_lengths"):
        given = arguments[name]
        right = isinstance(given, list | tuple) and all(is_integer(length) and length >= 0 for length in given)
        if c.require(right, name):
            lengths.append([int(length) for length in given])
    page, decodes, chunk = (arguments[name] for name in ("page_size", "decodes", "chunk_tokens"))
    c.require(is_integer(page) and (page in (16, 32) or (0 < page <= _MOST_KEYS and page % 64 == 0)), "page_size", "page size")
    c.require(is_integer(chunk) and chunk >= 1, "chunk_tokens")
    c.require(is_integer(decodes) and decodes >= 0, "decodes")
    table = c.tensor("block_table", torch.int32)
    if len(lengths) < 2 or table is None:
        return c.faults
    new, cached = lengths
    c.require(len(new) == len(cached), "query_lengths", "context_lengths")
    c.shaped("block_table", table, len(new), None, beside="query_lengths")
    slots = c.tensor("slot_mapping", torch.int64, torch.int32, optional=True)
    if slots is not None:
        c.shaped("slot_mapping", slots, sum(new), beside="query_lengths")
        c.require(slots.device == table.device, "slot_mapping", "block_table")
    if c.faults:
        return c.faults
    c.require(decodes <= len(new), "decodes")
    c.require(len(set(new[:decodes])) <= 1 and 0 not in new[:decodes], "decodes", "query_lengths", "decode requests")
    fits = all(a + b <= table.shape[1] * page for a, b in zip(new, cached, strict=True))
    c.require(fits, "block_table", "query_lengths", "context_lengths", "page_size", "block table")
    c.require(table.device.type != "meta", "block_table")
    return c.faults


def _expect_batch(arguments: Arguments, setting: Setting) -> Verify:
    new, cached, table, page = (arguments[name] for name in ("query_lengths", "context_lengths", "block_table", "page_size"))
    positions = [cached[i] + token for i in range(len(new)) for token in range(new[i])]
    requests = [i for i in range(len(new)) for _ in range(new[i])]
    slots = [int(table[i, position // page]) * page + position % page for i, position in zip(requests, positions, strict=True)]
    given = arguments["slot_mapping"]

    def verify(batch: Any) -> str:
        if not isinstance(batch, MlaBatch) or batch.positions.tolist() != positions:
            return "other positions"
        if batch.slot_mapping.tolist() != (slots if given is None else given.tolist()):
            return "other slots"
        chunks = () if batch.prefill is None else batch.prefill.chunks
        seen = sum(int(chunk.cu_seqlens[-1]) for chunk in chunks)
        return "" if seen == sum(cached[arguments["decodes"] :]) else f"{seen} cached keys in chunks"

    return verify


_LAYER = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_scaling", "max_position_embeddings", "indexer")
_LAYERS = ("no_rope_layers", "kv_source_layers", "sliding_window", "window_layers", "window")

HOST_SUBJECTS: dict[str, Subject] = {
    "workspace_size": Subject(cute_mla.workspace_size, _plain, _workspace_faults, _expect_workspace, ("total_q", "head_dim_v", "is_fp8_q")),
    "is_supported": Subject(cute_mla.is_supported, _plain, _supported_faults, _expect_supported, more=_FEATURES),
    "fingerprint": Subject(cute_mla.fingerprint, _plain, _fingerprint_faults, _expect_fingerprint, more=_FEATURES),
    "simulate": Subject(
        _simulated, _plain, _simulate_faults, _expect_simulated, more=("arch", "sm_count", "schedule", "seed", "on_finding")
    ),
    "quantise_cache": Subject(quantise_cache, _quantise_arguments, _quantise_faults, _expect_quantised, ("descale_k",)),
    "dequantise_cache": Subject(dequantise_cache, _dequantise_arguments, _dequantise_faults, _expect_dequantised, ("descale_k",)),
    "empty_cache": Subject(empty_cache, _plain, _empty_cache_faults, _expect_empty_cache, ("dtype",)),
    "MlaConfig": Subject(MlaConfig, _plain, _config_faults, _expect_config, (*_LAYER, *_LAYERS, "attention_bias")),
    "YarnScaling": Subject(YarnScaling, _plain, _yarn_faults, _expect_yarn, ("beta_slow", "llama_4_scaling_beta", "attention_factor")),
    "plan_batch": Subject(plan_batch, _batch_arguments, _batch_faults, _expect_batch, ("context",)),
}
