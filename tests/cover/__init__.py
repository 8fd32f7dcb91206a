"""Tiers of the test suite: the cheapest cover of the kernels runs in `make test`, the remaining parameter sets in `make test-full`.

elements: what a test reaches in the shipped kernels, or who notices the bug that it plants, and how. recording: a pytest plugin that
records it. records: the files of a recording. choosing: the cheapest tests that reach everything. tiers: the list of tests that only
`make test-full` runs, full_only.toml. breaking: runs tests with a broken kernel.

pytest --record-cover=FOLDER      records seconds and elements of every test of ROOMS, one file a process
python -m tests.cover choose      writes full_only.toml from a record
python -m tests.cover check       fails if the tests of `make test` miss an element that a moved test reaches; `make test-full` runs it
"""
