"""The indexer's logits under DeepGEMM's names, with what DeepGEMM leaves undefined."""

from __future__ import annotations

import torch

from ..ops import mqa_logits as op
from ..tracing import indexer
from ..tracing.public import public


@public(indexer.ROW_LOGITS)
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the indexer's logits of keys in a row: scale[k] * sum over heads h of weights[t, h] * relu(<q[t, h], kv[k]>).

    The interface is that of DeepGEMM's wrapper of this name, up to 2.7 and main of June 2026; 2.8 has no wrapper. fp8 alone: no MX scales.

    q                float8_e4m3fn [tokens, heads, 128], 1 to 64 heads; last dimension contiguous, other strides positive multiples of 16
                     bytes
    kv               keys float8_e4m3fn [keys, 128], last dimension contiguous, rows any positive multiple of 16 bytes apart, and their
                     scales, fp32 [keys], contiguous, aligned to 4 bytes. To 2^30 keys. q and keys start at multiples of 16 bytes
    weights          fp32 [tokens, heads]; last dimension contiguous
    ks, ke           int32 [tokens], contiguous: a token sees the keys ks to ke - 1. Both are clipped to 0 .. keys; with ks >= ke the token
                     sees nothing
    clean_logits     True: logits of keys that a token does not see are -inf. False: they are not written
    max_seqlen_k     0: column j is key j, of [tokens, keys] logits. More: column j of a token is key ks + j, of [tokens, max_seqlen_k]
                     logits, and keys from ks + max_seqlen_k on have none; clean_logits must be False
    out              fp32 tensor for the logits; last dimension contiguous, rows any number of elements apart, shares memory with nothing

    Returns fp32 [tokens, keys or max_seqlen_k], without `out` a view whose rows begin at multiples of 1,024 bytes. Products are summed in
    the tensor cores over the 128 columns, heads in fp32 in a fixed order: the bits of a logit depend on its token, its key and the number
    of heads alone. Keys that no token sees, and scales of such keys, may hold anything. NaN in a key, its scale or in a token reaches the
    logits of that key, or token, alone.

    Without out, the result is all that is allocated. Runs on the current stream, does not synchronise, and can be captured in a CUDA graph.
    CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """Return int32 [num_sms + 1, 2] of zeros, to pass as metadata where DeepGEMM's callers do; fp8_paged_mqa_logits does not read it.

    context_lens     int32 [batch] or [batch, tokens], contiguous
    block_kv         keys of a page: 16, 32, 64 or 128
    num_sms          1 or more

    Work is divided on the device by the lengths of the call itself, so metadata of other lengths does no harm.

    Raises ValueError on bad arguments.
    """
    return op.metadata(context_lens, block_kv, num_sms)


@public(indexer.PAGED_LOGITS)
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    metadata: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = True,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the indexer's logits of keys in an index cache, as fp8_mqa_logits computes them: bit for bit the same.

    The interface is that of DeepGEMM's wrapper of this name up to main of June 2026, with lengths in one dimension (older) or two (newer).

    q                float8_e4m3fn [batch, tokens, heads, 128], 1 to 64 heads; last dimension contiguous, strides positive multiples of 16
                     bytes, requests `tokens` tokens apart
    cache            uint8 [pages, page size, 1, 132]: in each page the values of its keys, float8_e4m3fn [page size, 128], then their
                     scales, fp32 [page size]. Page size 16, 32, 64 or 128; pages contiguous, any multiple of 16 bytes apart. q and cache
                     start at multiples of 16 bytes
    weights          fp32 [batch * tokens, heads]; last dimension contiguous
    context_lens     int32, contiguous: [batch], of which token j sees the first context_lens[b] - tokens + 1 + j keys, or
                     [batch, tokens], of which it sees context_lens[b, j]. Lengths are clipped to 0 and to the lesser of max_context_len
                     and block_table.shape[1] * page size
    block_table      int32 [batch, pages per request]; last dimension contiguous. Entries behind a length are not read. A page that an
                     entry outside [0, pages) names has logits of 0; on the simulated device it is a finding
    metadata         of get_paged_mqa_logits_metadata, or None; not read
    max_context_len  columns of the result, to 2^30
    clean_logits     True: columns behind what a token sees are -inf. False: they are not written. DeepGEMM cannot clean with lengths
                     [batch, tokens]; this function can
    out              as in fp8_mqa_logits

    Returns fp32 [batch * tokens, max_context_len], as fp8_mqa_logits does.

    Without out, the result is all that is allocated. Runs on the current stream, does not synchronise or read lengths on the host, and can
    be captured in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
