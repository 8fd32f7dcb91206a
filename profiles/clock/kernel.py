"""Clock of one launch: executes the machine code of a cluster on the simulated device, and times it while it runs."""

from __future__ import annotations

from cute_mla.simulator.sass.listing import Listing
from cute_mla.simulator.sass.trace import MachineTrace

from .constants import Constants
from .engine import Engine, Result, Setting, StandstillError
from .instructions import time_listing
from .program import Decoder

MOST_TESTS = 10_000  # of phases, in a row, while nothing else happens in the cluster


class KernelClock:
    """Timing of the first cluster of a launch. listing: the machine code. ctas: of the cluster. warps: of each CTA."""

    def __init__(self, listing: Listing, ctas: int, warps: int, constants: Constants, setting: Setting) -> None:
        self.decoder = Decoder(listing, time_listing(listing, constants), ctas)
        self.engine = Engine(ctas, warps, constants, setting)
        self._trace: MachineTrace | None = None
        self._done: dict[tuple[int, int], int] = {}
        self._polling: set[tuple[int, int]] = set()  # warps whose last test of a phase failed
        self._tests, self._seen = 0, -1

    def attach(self, trace: MachineTrace) -> None:
        """Time what a trace records, and answer its questions."""
        self._trace = trace
        trace.oracle = self._answer

    def result(self) -> Result:
        """Return the times, once the launch has run. StandstillError for one that waits for what never comes."""
        self._feed(is_whole=True)
        while self.engine.run() is not None:
            pass
        if self._trace is not None and self._trace.timeouts:
            raise StandstillError(f"a wait has ended without its phase, after a time that is not known: {'; '.join(self._trace.timeouts)}")
        return self.engine.result()

    def _answer(self) -> tuple[int, int, bool] | None:
        """Run the clock as far as the warps have been executed, to the next question. Return its answer, or None where it never changes."""
        self._feed(is_whole=False)
        found = self.engine.run()
        return None if found is None or self._tests_in_vain(*found) else found

    def _tests_in_vain(self, rank: int, warp: int, is_complete: bool) -> bool:
        """Return True when warps have tested phases too often while no other warp issued anything and no unit was at work."""
        (self._polling.discard if is_complete else self._polling.add)((rank, warp))
        issued = sum(item.pc for place, item in self.engine.warps.items() if place not in self._polling)
        alone = not is_complete and issued == self._seen and not self.engine.has_events()
        self._tests, self._seen = self._tests + 1 if alone else 0, issued
        return self._tests >= MOST_TESTS

    def _feed(self, is_whole: bool) -> None:
        assert self._trace is not None
        self.decoder.buffers = self._trace.buffers
        for place, steps in self._trace.warps.items():
            program, self._done[place] = self.decoder.program(place, steps, self._done.get(place, 0), is_whole)
            self.engine.extend(*place, program)
