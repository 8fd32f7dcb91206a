"""CuTe-DSL sources: a room per op, and rooms for what ops share (primitives, attention, sm90, sm100)."""
