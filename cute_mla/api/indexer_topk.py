"""indexer_topk: logits and selection of keys in one call, in bounded memory."""

from __future__ import annotations

import torch

from ..tracing import indexer
from ..tracing.public import public


@public(indexer.PAGED_TOPK)
def indexer_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    *,
    slots: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the keys of an index cache with the topk greatest logits, of each query token.

    q, weights       as in fp8_paged_mqa_logits, and so are
    index_cache      (there cache),
    context_lens     and
    block_table      with up to 16,777,216 keys a request, block_table.shape[1] * page size
    topk             keys of a token, 0 to 2^30
    slots            False: keys are given by their positions in the request. True: by their slots in the cache, block_table[b, p // page
                     size] * page size + p % page size, as sparse attention takes them; -1 for a key on a page outside the cache
    workspace        tensor of at least workspace_size("indexer_topk", ..) bytes, contiguous, at a multiple of 16 bytes
    out              int32 [batch * tokens, topk] for the result; last dimension contiguous, shares memory with nothing else

    Returns int32 [batch * tokens, topk]: what topk_indices(fp8_paged_mqa_logits(..), lengths, topk) returns, with slots in the place of
    positions if asked for: in ascending order of position, and -1 behind the last. All logits are never held at once: as many tokens as
    have 40 MB of logits, or 64 MB with more than 131,072 keys a request, are scored and their keys chosen, then the next. The division has
    no influence on the result. If no request can have more than topk keys, all are chosen and none is scored.

    With workspace and out given, nothing is allocated, unless a single request has more than 40 MB of logits and its length is given as
    one number: then the lengths of its tokens take 4 bytes each. Runs on the current stream, does not synchronise or read lengths on the
    host, and can be captured in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """


@public(indexer.ROW_TOPK)
def indexer_topk_prefill(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    *,
    max_seqlen_k: int | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the keys in a row with the topk greatest logits, of each query token, by their positions behind ks.

    q, kv, weights   as in fp8_mqa_logits, and so are
    ks, ke           position p of a token is key ks + p
    topk             keys of a token, 0 to 2^30
    max_seqlen_k     the most keys that a token sees, to 16,777,216; of one that sees more, only the first ones are looked at. None: as
                     many as kv has. It decides on how many tokens are scored at a time
    workspace        tensor of at least workspace_size("indexer_topk", ..) bytes, contiguous, at a multiple of 16 bytes
    out              int32 [tokens, topk] for the result; last dimension contiguous, shares memory with nothing else

    Returns int32 [tokens, topk], as indexer_topk does. With workspace and out given, nothing is allocated. Runs on the current stream, does
    not synchronise, and can be captured in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
