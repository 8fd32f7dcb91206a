"""Tests of the clock: units in time, kernels of known time, and what is drawn of a run."""
