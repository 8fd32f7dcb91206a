"""Suites of each op: smoke cases, the full suite, and the part of it that the simulated device runs; testing/suite.py picks from them."""
