"""Tests of the cases, suites and comparisons that the package ships."""
