"""Mutation of shipped kernels: every barrier, wait, fence, commit and expected byte is broken in turn, and somebody must notice.

python -m tests.mutation run     breaks kernels and records what was noticed, one JSON line each; goes on where an earlier run stopped
python -m tests.mutation report  the score by kind and architecture, and the survivors that survivors.toml does not explain
"""
