"""Broken kernels: bugs in the PTX of shipped kernels, and who notices them.

sites: edits of PTX and where they apply. planting: declared bugs, with the cases that must notice. planted: the bugs of every family of
kernels, which `make test` plants. bench: runs broken PTX and judges it. campaign: what is broken in turn, and how it is
judged. numeric: edits of numbers and indices. smoke: judges those by the cases of a suite. machine: edits of machine code. report: the
records of a campaign against survivors.toml, machine.toml and floors.toml.

python -m tests.mutation run CAMPAIGN     breaks kernels and records what was noticed; goes on where an earlier run stopped
python -m tests.mutation report CAMPAIGN  the score by kernel and kind; fails on survivors without a reason, or below a floor

synchronisation: every barrier, wait, fence, commit and expected byte of every kernel. numbers: numbers and indices of a kernel of each
structure. machine: control codes, synchronisation and operands in the machine code of a kernel of each structure.
"""
