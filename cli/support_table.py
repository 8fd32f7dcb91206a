"""Tables of what is supported, as docs/support.md shows them: kernels from the closed list, options from is_supported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from cute_mla.aot_build.variants import Variant, closed_variants
from cute_mla.spec.arch import ARCHS
from cute_mla.spec.cache_rows import CACHED
from cute_mla.spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from cute_mla.spec.mla import D_QK

# Fields that say how a kernel lays out rows. The table leaves them out: listed kernels ship with all values that calls need.
_UNLISTED_FIELDS = ("cluster", "columns", "few_heads", "few_rows", "rows64", "slots", "head_tile", "head_tiles", "stream")
_INTERNAL_OPS = (  # run inside other calls; no public function calls them alone
    *("split_plan", "combine", "dense_prefill_dq"),
    *("row_statistics", "sparse_prefill_dq", "key_lists", "row_sums"),
)
_HEADS = {**dict.fromkeys((192, 128), "192 or 128 columns of q and k, 128 of v"), 256: "256 columns of q and k, 256 of v"}  # by d_qk

# Meaning of the values of a configuration, except the element type. A kernel without an entry here cannot be listed.
_WORDS: dict[str, dict[str, dict[Any, str]]] = {
    "dense_decode": {
        "operands": {
            "latent": "dense decode, 16-bit cache of 576 columns",
            **dict.fromkeys((512, 320), "dense decode, 16-bit cache of 512 and 320 columns"),
            1088: "dense decode, 16-bit cache of 1,088 columns",
            "fp8_cache": "dense decode, e4m3 cache, 16-bit queries",
            "fp8": "dense decode, e4m3 cache and queries (type of out)",
        }
    },
    "sparse_decode": {
        "cache": {
            "latent": "sparse decode, 16-bit cache",
            "fp8_656": "sparse decode, FP8 cache of 656 bytes a token",
            "fp8_584": "sparse decode, FP8 cache of 584 bytes a token",
            **dict.fromkeys(("v41", "nope_528"), "sparse decode, FP8 cache of 528 bytes a token, three formats"),
            "v41_fp4": "sparse decode, the same with an FP4 extra cache of 288 bytes a token",
        }
    },
    "sparse_prefill": {"d_qk": dict.fromkeys((576, 512), "sparse prefill, rows of 576 and 512")},
    "sparse_prefill_dkv": {"d_qk": dict.fromkeys((576, 512), "sparse prefill, backward, rows of 576 and 512")},
    "dense_prefill": {"d_qk": {d_qk: f"dense prefill, {heads}" for d_qk, heads in _HEADS.items()}},
    "masked_prefill": {
        "d_qk": dict.fromkeys(MASKED_HEAD_DIMS, "dense prefill with a mask of keys, 192 or 128 columns of q and k, 128 of v")
    },
    "dense_prefill_dkdv": {"d_qk": {d_qk: f"dense prefill, backward, {heads}" for d_qk, heads in _HEADS.items()}},
    "mqa_logits": {"paged": dict.fromkeys((False, True), "the indexer's logits, keys in a row and in an index cache")},
    "topk_indices": {"": {None: "`topk_indices`"}},
    "index_write": {"rows": dict.fromkeys(("keys", "queries"), "the indexer's keys and queries")},
    "head_sums": {"kind": {"probs": "`attention_head_sums`, rows of 576 and 512", "scores": "`indexer_scores`"}},
    "indexer_backward": {"": {None: "`indexer_scores`, backward"}},
    "merge_states": {"head_dim": dict.fromkeys((512, 256, 128), "`merge_states`, rows of 512, 256 and 128")},
    **{
        op: {
            "cache": {
                "latent": f"{what}, 16-bit cache",
                "latent_512": f"{what}, 16-bit cache",
                "latent_320": f"{what}, 16-bit cache",
                "latent_1088": f"{what}, 16-bit cache",
                "fp8_576": f"{what}, e4m3 cache of 576 bytes a token",
                "fp8_656": f"{what}, FP8 cache of 656 bytes a token",
                "fp8_584": f"{what}, FP8 cache of 584 bytes a token",
                **dict.fromkeys(("v41", "nope_528"), f"{what}, FP8 cache of 528 bytes a token, three formats"),
            }
        }
        for op, what in (("cache_write", "writing keys"), ("cache_gather", "gathering keys"))
    },
    "cache_insert": {
        "cache": {
            **dict.fromkeys(CACHED, "inserting keys with norm and rotation, every other format"),
            "latent": "inserting keys with norm and rotation, 16-bit cache of 576 columns",
        }
    },
}
_TYPES = {"b16": "bf16, fp16"}

_ON, _OFF = "yes", "no"
_MANY = 1 << 20  # heads that no limit of a kernel but that of a launch stops


def kernels() -> list[tuple[str, dict[str, str]]]:
    """Return (description, element types by architecture) for every kernel that ships, in the order of _WORDS.

    KeyError for a kernel without a description.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for arch in ARCHS.values():
        for variant in closed_variants(arch):
            if variant.op not in _INTERNAL_OPS:
                types = found.setdefault(_what(variant), {}).setdefault(arch.name, [])
                types.append(asdict(variant.config)["dtype"])  # type: ignore[call-overload]  # every config is a dataclass
    order = [text for fields in _WORDS.values() for texts in fields.values() for text in texts.values()]
    return [(what, {arch: _joined(types) for arch, types in found[what].items()}) for what in sorted(found, key=order.index)]


def _joined(types: Sequence[str]) -> str:
    return ", ".join(_TYPES.get(each, each) for each in dict.fromkeys(types))


def _what(variant: Variant) -> str:
    fields = {key: value for key, value in asdict(variant.config).items() if key not in (*_UNLISTED_FIELDS, "dtype")}  # type: ignore[call-overload]
    if "operands" in fields and fields.pop("d_qk") != D_QK:  # dense decode
        fields["operands"] = asdict(variant.config)["d_qk"]  # type: ignore[call-overload]
    ((name, value),) = fields.items() or ((("", None)),)
    return _WORDS[variant.op][name][value]


def options() -> list[tuple[str, dict[str, str]]]:
    """Return (feature, supported values by op), as is_supported answers. The answers must be equal on all architectures."""
    from cute_mla.api.support import FEATURES
    from cute_mla.ops.limits import OPS

    return [(feature, {op: _answer(op, feature) for op in OPS}) for feature in FEATURES]


def _answer(op: str, feature: str) -> str:
    """Return the supported values of a feature. is_supported names them in its answer to -1, which no feature supports."""
    from cute_mla.api import is_supported

    answers = {is_supported(op, arch, **{feature: -1})[1].rpartition("supported: ")[2] for arch in ARCHS}
    (answer,) = answers
    return {"False, True": _ON, "False": _OFF, "None": "–"}.get(answer, answer.replace("'", ""))


def summary() -> str:
    """Return a line for each op, as the README has them: types, columns, heads, and the options that it supports."""
    from cute_mla.ops.limits import OPS

    answers = dict(options())
    rows = []
    for op in OPS:
        own = {feature: by_op[op] for feature, by_op in answers.items()}
        heads = "any" if int(own["h_q"].rpartition(" ")[2]) > _MANY else own["h_q"]
        rows.append(
            [f"`{op}`", own["dtype"], own["head_dim"], own["head_dim_v"], heads, ", ".join(f"`{name}`" for name in own if own[name] == _ON)]
        )
    return _table(("call", "types", "columns of keys", "of values", "heads", "options"), rows) + "\n"


def markdown() -> str:
    """Return both tables, and between them the architectures and their verification status.

    ValueError if an architecture has other types of a kernel than another one that has the kernel.
    """
    archs = [f"`{arch.name}` ({arch.gpu_arch}; compute capability {arch.capabilities_text})" for arch in ARCHS.values()]
    (status,) = {arch.proof.replace(arch.name, listed_as(ARCHS)) for arch in ARCHS.values()}
    listed = options()
    ops = list(listed[0][1])
    asked = [[f"`{name}`", *answers.values()] for name, answers in listed]
    parts = (
        _table(("kernels", "formats or columns: element types", "architectures"), _grouped()),
        f"The architectures: {listed_as(archs)}. Verification status: {status}.",
        _table(["option of a call", *(f"`{op}`" for op in ops)], asked),
    )
    return "\n\n".join(parts) + "\n"


def listed_as(names: Iterable[str]) -> str:
    """Return names as text, such as "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _grouped() -> list[list[str]]:
    """Return a row for each kind of kernel.

    What descriptions have before the first comma, what they have behind it with its types, and the architectures of the kind. A format that
    lacks one of these says which it has.
    """
    groups: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for what, by_arch in kernels():
        (types,) = set(by_arch.values())
        kind, _, rest = what.partition(", ")
        groups.setdefault(kind, []).append((f"{rest}: {types}" if rest else types, tuple(by_arch)))
    rows = []
    for kind, formats in groups.items():
        most = tuple(arch for arch in ARCHS if any(arch in archs for _, archs in formats))
        texts = [text if archs == most else f"{text} ({', '.join(archs)})" for text, archs in formats]
        rows.append([kind, "; ".join(texts), ", ".join(most)])
    return rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
