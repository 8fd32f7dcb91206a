"""Cases: a case is one call of an op in every particular. `operations` has a folder for each op, which makes its cases and their tensors.

combine and split_plan have no cases: tests of their own check them, and they also run in every decode case whose requests are split.
"""
