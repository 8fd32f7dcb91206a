"""Broken kernels: bugs in the PTX of shipped kernels, and who notices them.

sites: edits of PTX and where they apply. planting: declared bugs, with the cases that must notice. planted: the bugs of every family of
kernels, which `make test` plants. bench: runs broken PTX and judges it. reloading: loads only what an edit changes. campaign: every
barrier, wait, fence, commit and expected byte of every kernel is broken in turn. numeric: edits of numbers and indices. smoke: judges
those by the cases of a suite. equality: proves that an edit changes nothing, by the ranges of registers (intervals, ranges, bounds).
verdicts: sorts the records of numeric edits. attack: searches calls that show an edit. machine: edits of
machine code.

python -m tests.mutation run     breaks kernels and records what was noticed, one JSON line each; goes on where an earlier run stopped
python -m tests.mutation report  the score by kind and architecture, and the survivors that survivors.toml does not explain
python -m tests.mutation numbers breaks numbers and indices of a kernel of each structure
python -m tests.mutation numbers-report  the verdicts by kernel and kind, and the survivors without proof or reason in numbers.toml
python -m tests.mutation numbers-attack  searches calls that show survivors with a proof or a reason
python -m tests.mutation machine  breaks the machine code of a kernel of each structure: control codes, synchronisation, operands
python -m tests.mutation machine-report  the verdicts by kernel and kind, and the survivors without a reason in machine.toml
"""
