"""The smoke suite notices every bug that planted/decode_options.py declares, in a kernel of each structure.

A site that none of the cases runs is no gap: a window and units of cu_seqlens_q never meet, though each runs what they share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.runner import Schedule
from tests.mutation.planted.decode_options import KERNELS, SILENT, SILENT_OF
from tests.mutation.planting import Bug
from tests.mutation.sites import Mutation
from tests.mutation.smoke import SmokeSubject


class OptionSubject(SmokeSubject):
    """A kernel with the smoke cases that have any of the options."""

    def cases(self, suite_name: str) -> Iterator[tuple[BaseCase, Schedule]]:
        """Yield the cases that may launch the kernel and have results to judge by."""
        for case, schedule in super().cases(suite_name):
            plain = (
                isinstance(case, DenseDecodeCase) and case.tokens is None and (case.tree, case.window, case.sinks) == ("none", None, "none")
            )
            if case.results_defined and not plain:
                yield case, schedule

    def survives(self, mutation: Mutation) -> bool:
        """Return whether cases run the broken line and none notices."""
        return not self.judge(mutation).noticed and any(mutation.line in trial.lines for trial in self.known)


def sites(kernel: str, bug: Bug) -> list[Mutation]:
    """Return the sites that a bug breaks one by one."""
    return [site for (site,) in bug.groups(load_artifacts().ptx(load_artifacts().manifest.kernels[kernel]))]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_bug_has_sites(kernel: str) -> None:
    assert all(sites(kernel, bug) for bug in KERNELS[kernel])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_bugs_of_options_are_noticed(kernel: str) -> None:
    subject = OptionSubject(load_artifacts().manifest.kernels[kernel])
    found = {bug.name: [site.line for site in sites(kernel, bug) if subject.survives(site)] for bug in KERNELS[kernel]}
    silent = {**SILENT, **SILENT_OF.get(kernel, {})}
    assert {name: lines for name, lines in found.items() if len(lines) > silent.get(name, 0)} == {}
