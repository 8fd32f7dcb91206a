"""Indexers that choose in two steps: pools of keys and then their tokens (GLM-5.3-Flash), blocks of keys and then keys (DeepSeek-V4.1).

Plain torch around write_index_cache's rows, topk_indices and indexer_topk, on any device, without synchronising.
"""

from __future__ import annotations

import torch

from ..ops.arguments import check_integer
from ..ops.index_torch import prepared, write_index_rows
from ..ops.mqa_logits import check_cache
from ..ops.tensor_spec import check_shape, spec_of
from ..spec.index_write import ROTARY
from ..spec.mla import ceil_div
from ..spec.mqa_logits import COLUMNS
from .indexer import topk_indices


def write_pooled_index_keys(
    k: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    tail: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    tail_rows: torch.Tensor | None = None,
    hadamard: bool = False,
) -> None:
    """Pool the indexer's keys of neighbouring tokens, and write the pools that new tokens complete to an index cache.

    k                keys behind their norm, [tokens, 128], of new tokens, packed by request
    gate             logits of a token's share in its pool, of each column, [tokens, 128]
    bias             of a token by its place in the pool, [pool, 128]; pool is the number of tokens of a pool
    index_cache      uint8 [pages, page size, 1, 132], as write_index_cache, with a key for each pool
    block_table      int32 [requests, pages per request]: pool p of request r is row p % page size of page block_table[r, p // page size];
                     pools behind its end, and on pages outside the cache, are not written
    tail             [rows, ring, 256]: keys and gates of each request's last tokens, at position p in place p % ring; read and written.
                     ring is at least pool - 1 + the new tokens of a step that may later be taken back, and at least pool
    cu_seqlens       int32 [requests + 1], packed new tokens of each request; its last element is the number of tokens
    context_lens     int32 [requests], tokens of each request before the new ones
    tail_rows        int64 or int32 [requests], row of tail of each request, no two the same; None: row r for request r. Requests that
                     only pad a CUDA graph may share a row of their own
    hadamard         as in write_index_cache

    A pool's key is the sum over its tokens of softmax(gate + bias) * k, column by column, in fp32 (modeling_glm5_next.py,
    get_pooled_states), quantised as write_index_cache quantises a key, without a rotation. Pools begin at a request's first token.

    Raises ValueError if shapes do not match, and for index caches that kernels cannot read.
    """
    _check_shape("k", k, "tokens", COLUMNS)
    _check_shape("context_lens", context_lens, "requests")
    tokens, requests, device = k.shape[0], context_lens.shape[0], k.device
    _check_shape("gate", gate, tokens, COLUMNS)
    _check_shape("bias", bias, "pool", COLUMNS)
    _check_shape("cu_seqlens", cu_seqlens, requests + 1)
    _check_shape("block_table", block_table, requests, "pages per request")
    _check_shape("tail", tail, "rows", "ring", 2 * COLUMNS)
    check_cache("index_cache", spec_of("index_cache", index_cache), device, "k")
    pool, ring = check_integer("bias.shape[0]", bias.shape[0], 1), tail.shape[1]
    if ring < pool:
        raise ValueError(f"tail has {ring} tokens a row; supported: pools of {pool} tokens, and so many or more")
    if tail_rows is not None:
        _check_shape("tail_rows", tail_rows, requests)
    elif tail.shape[0] < requests:
        raise ValueError(f"tail has {tail.shape[0]} rows, and tail_rows is None; supported: a row for each of {requests} requests")
    if not tokens:
        return
    rows = torch.arange(requests, device=device) if tail_rows is None else tail_rows
    request = torch.arange(requests, device=device).repeat_interleave(cu_seqlens.diff(), output_size=tokens)
    token = torch.arange(tokens, device=device)
    within = token - cu_seqlens[request]
    position = context_lens[request] + within
    states = torch.cat((k, gate), dim=1).to(tail.dtype)

    is_last = position % pool == pool - 1
    last = is_last.byte().argsort(descending=True, stable=True)[: min(tokens, tokens // pool + requests)]
    own, behind = request[last], torch.arange(1 - pool, 1, device=device)
    members = (last.unsqueeze(1) + behind).clamp(min=0)
    places = (position[last].unsqueeze(1) + behind) % ring
    is_new = within[last].unsqueeze(1) + behind >= 0
    taken = torch.where(is_new.unsqueeze(2), states[members], tail[rows[own].unsqueeze(1), places]).float()
    keys, gates = taken.split(COLUMNS, dim=2)
    pooled = ((gates + bias.float()).softmax(dim=1) * keys).sum(dim=1)
    still = torch.cat((pooled.new_ones(len(last), ROTARY // 2), pooled.new_zeros(len(last), ROTARY // 2)), dim=1)
    slots = _slots((position[last] // pool).unsqueeze(1), block_table[own], index_cache.shape[1]).squeeze(1)
    write_index_rows(prepared(pooled, still, "interleaved", hadamard), index_cache, torch.where(is_last[last], slots, -1), exponents=False)

    # Of tokens that share a place, each writes what the last one has
    end = cu_seqlens[request + 1] - 1
    tail[rows[request], position % ring] = states[token + (end - token) // ring * ring]


def expand_pools(pools: torch.Tensor, lengths: torch.Tensor, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of chosen pools, and behind them those of the last pool, which is not complete.

    pools            int32 [tokens, chosen], pools of each query token, ascending, then -1: indexer_topk over lengths // pool pools
    lengths          int32 [tokens], tokens that each query token sees, itself included; none if that is negative
    pool             tokens of a pool

    Returns positions int32 [tokens, chosen * pool + pool - 1], ascending, then -1, and counts int32 [tokens], of those that are not -1.
    Raises ValueError if shapes do not match.
    """
    check_integer("pool", pool, 1)
    _check_shape("pools", pools, "tokens", "chosen")
    _check_shape("lengths", lengths, pools.shape[0])
    chosen = (pools >= 0).sum(dim=1, keepdim=True, dtype=torch.int32) * pool
    lengths = lengths.clamp(min=0).unsqueeze(1)
    column = torch.arange(pools.shape[1] * pool + pool - 1, dtype=torch.int32, device=pools.device)
    padded = torch.nn.functional.pad(pools, (0, 1), value=-1)
    of_pools = padded[:, (column // pool).clamp(max=pools.shape[1])] * pool + column % pool
    of_tail = lengths // pool * pool + column - chosen
    positions = torch.where(column < chosen, of_pools, torch.where(of_tail < lengths, of_tail, -1))
    return positions.int(), (chosen + lengths % pool).squeeze(1).int()


def slots_of_positions(positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots of positions in a paged cache, as sparse decode takes them.

    positions        int32 [tokens, any]; -1 stays -1
    block_table      int32 [requests, pages per request]; each request has as many tokens, one behind the other
    page_size        keys of a page

    Returns int32 [tokens, any]; -1 also for positions behind the end of the block table and on negative pages. Raises ValueError if
    shapes do not match.
    """
    check_integer("page_size", page_size, 1)
    _check_shape("positions", positions, "tokens", "any")
    table = _table_of_tokens(block_table, positions.shape[0])
    return torch.where(positions < 0, -1, _slots(positions.clamp(min=0), table, page_size)).int()


def select_blocks(logits: torch.Tensor, lengths: torch.Tensor, topk: int, block: int) -> torch.Tensor:
    """Return the blocks of keys with the greatest logits, and always the last one.

    logits           fp32 [tokens, keys], below infinity; those behind a token's length may be anything
    lengths          int32 [tokens], keys that each token sees; all if that is more
    topk             blocks of a token
    block            keys of a block, whose logit is the greatest of them; NaN is less than any other

    Returns int32 [tokens, topk]: blocks ascending, then -1, as topk_indices. Raises the errors of topk_indices, and ValueError if shapes do
    not match.
    """
    check_integer("block", block, 1)
    _check_shape("logits", logits, "tokens", "keys")
    tokens, keys = logits.shape
    _check_shape("lengths", lengths, tokens)
    lengths, blocks = lengths.clamp(max=keys), ceil_div(keys, block)
    counts = (torch.arange(keys, device=logits.device) < lengths.unsqueeze(1)) & (logits > -torch.inf)
    padded = torch.nn.functional.pad(logits.masked_fill(~counts, -torch.inf), (0, blocks * block - keys), value=-torch.inf)
    scores = padded.view(tokens, blocks, block).amax(dim=2)
    newest = (lengths.unsqueeze(1) - 1) // block
    scores.masked_fill_(torch.arange(blocks, device=logits.device) == newest, torch.inf)
    return topk_indices(scores, ((lengths + block - 1) // block).int(), topk)


def pages_of_blocks(
    blocks: torch.Tensor, lengths: torch.Tensor, block: int, block_table: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of chosen blocks as a block table of each token, over which indexer_topk chooses keys with slots=True.

    blocks           int32 [tokens, chosen], of select_blocks
    lengths          int32 [tokens], keys that each token sees
    block            keys of a block, a multiple of page_size
    block_table      int32 [requests, pages per request]; each request has as many tokens, one behind the other
    page_size        keys of a page of the index cache

    Returns table int32 [tokens, chosen * block / page_size], and int32 [tokens], the keys of its pages that the token sees. Each token is
    then a request of one query token. Raises ValueError if a page has keys of several blocks, or if shapes do not match.
    """
    _check_shape("blocks", blocks, "tokens", "chosen")
    _check_shape("lengths", lengths, blocks.shape[0])
    if check_integer("block", block, 1) % check_integer("page_size", page_size, 1):
        raise ValueError(f"blocks have {block} keys and pages {page_size}; supported: blocks of whole pages")
    each, chosen = block // page_size, (blocks >= 0).sum(dim=1)
    columns = (blocks.unsqueeze(2) * each + torch.arange(each, device=blocks.device)).flatten(1)
    table = _pages(columns, _table_of_tokens(block_table, blocks.shape[0]))
    newest = blocks.max(dim=1).values if blocks.shape[1] else torch.full_like(chosen, -1)
    seen = (chosen - 1) * block + (lengths - newest * block).clamp(max=block)
    return table.int(), torch.where(chosen > 0, seen, 0).int()


def _check_shape(name: str, tensor: torch.Tensor, *shape: int | str) -> None:
    """Raise ValueError unless an argument is a tensor of this shape. A string stands for any size."""
    check_shape(name, spec_of(name, tensor), shape)


def _table_of_tokens(block_table: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the row of a block table of each token. ValueError unless each request has as many tokens."""
    _check_shape("block_table", block_table, "requests", "pages per request")
    requests = block_table.shape[0]
    if tokens % max(requests, 1) or (tokens and not requests):
        raise ValueError(f"there are {tokens} tokens and {requests} requests; supported: as many tokens of each request")
    return block_table.repeat_interleave(tokens // max(requests, 1), dim=0)


def _pages(columns: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the pages in columns [rows, any] of the block table of each row; -1 where it has no such column."""
    last = table.shape[1]
    padded = torch.nn.functional.pad(table, (0, 1), value=-1)
    return padded.gather(1, torch.where(columns < 0, last, columns).clamp(max=last).long())


def _slots(positions: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots of positions [rows, any] by the block table of each row, int64; -1 behind its end and on negative pages."""
    positions = positions.long()
    page = _pages(positions // page_size, table).long()
    return torch.where(page < 0, -1, page * page_size + positions % page_size)
