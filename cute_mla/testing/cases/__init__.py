"""Cases: a case is one call of an op in every particular. One module per op has its cases and makes their tensors.

merge_states, combine and split_plan have no cases: tests of their own check them, and combine and split_plan also run in every decode case
whose requests are split.
"""
