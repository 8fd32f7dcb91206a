"""Analytic model of a call: predicted times, from tile costs, instruction counts and machine constants."""
