"""CuTe-DSL sources, one file per (op, architecture)."""
