"""Idioms of one instruction or one copy: barriers, TMA, tcgen05, fragments, loads and stores. They know nothing of attention."""
