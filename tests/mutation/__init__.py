"""Broken kernels: bugs in the PTX of shipped kernels, and who notices them.

sites: edits of PTX and where they apply. planting: declared bugs, with the cases that must notice. planted: the bugs of every family
of kernels, which `make test` plants. bench: runs broken PTX and judges it. campaign: every barrier, wait, fence, commit and expected
byte of every kernel is broken in turn. numeric: edits of numbers and indices. smoke: judges those by the cases of the smoke suite.

python -m tests.mutation run     breaks kernels and records what was noticed, one JSON line each; goes on where an earlier run stopped
python -m tests.mutation report  the score by kind and architecture, and the survivors that survivors.toml does not explain
python -m tests.mutation numbers breaks numbers and indices of a kernel of each structure; numbers-report prints the score
"""
