"""Tests of kernels against an fp64 reference, on a GPU or on the simulated device.

cases, suites and operations have one module per op: its cases and their tensors, the suites of these cases, and the call with its
reference. runner runs the cases of a suite, and compare decides which results pass. split_plan_reference is the plan of split_plan in plain
Python.
"""
