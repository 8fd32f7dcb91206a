"""Drop-in replacement of the package flash_mla in its form of 2026; form_a is the form of 2025.

`import cute_mla.flash_mla as flash_mla` replaces `import flash_mla`. docs/migrating-from-flashmla.md lists what differs.
"""

from . import form_a
from .flash_mla_interface import (
    FlashMLASchedMeta,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "form_a",
    "get_mla_metadata",
]
