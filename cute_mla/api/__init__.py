"""Public functions: signatures and reference pages, and nothing else. The bodies are in ops/."""

from .flashmla import (
    MlaSchedule,
    flash_mla_sparse_bwd,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
    plan_sparse_backward,
)
from .orders import Fingerprint, fingerprint, row_digest
from .states import merge_states
from .support import is_supported
from .varlen import (
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .workspace import workspace_size

__all__ = [
    "Fingerprint",
    "MlaSchedule",
    "fingerprint",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_bwd",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "is_supported",
    "merge_states",
    "plan_sparse_backward",
    "row_digest",
    "workspace_size",
]
