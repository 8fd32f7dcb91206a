"""Multi-head latent attention of transformers' models by cute_mla.

patch() replaces the attention modules of a model by cute_mla.layer, over a latent cache that generate() carries, and unpatch() puts them
back, with the weights as they are then. register() makes
attn_implementation="cute_mla" known to transformers, which then expands keys and values itself and calls dense prefill.

    patching      the modules that patch() knows, and their weights
    attention     the module that takes their place
    step          the plan of one forward call, for all layers of a model
    latent_cache  the pages of one layer, inside transformers' DynamicCache
    interface     attn_implementation="cute_mla"
"""

from .interface import register
from .patching import patch, unpatch

__all__ = ["patch", "register", "unpatch"]
