"""Clock of one launch: executes the machine code of a cluster on the simulated device, and times it while it runs."""

from __future__ import annotations

from cute_mla.simulator.sass.listing import Listing
from cute_mla.simulator.sass.trace import MachineTrace

from .constants import Constants
from .engine import Engine, Result, Setting
from .instructions import time_listing
from .program import Decoder


class KernelClock:
    """Timing of the first cluster of a launch. listing: the machine code. ctas: of the cluster. warps: of each CTA."""

    def __init__(self, listing: Listing, ctas: int, warps: int, constants: Constants, setting: Setting) -> None:
        self.decoder = Decoder(listing, time_listing(listing, constants), ctas)
        self.engine = Engine(ctas, warps, constants, setting)
        self._trace: MachineTrace | None = None
        self._done: dict[tuple[int, int], int] = {}

    def attach(self, trace: MachineTrace) -> None:
        """Time what a trace records, and answer its questions."""
        self._trace = trace
        trace.oracle = self._answer

    def result(self) -> Result:
        """Return the times, once the launch has run."""
        self._feed(is_whole=True)
        while self.engine.run() is not None:
            pass
        return self.engine.result()

    def _answer(self) -> tuple[int, int, bool] | None:
        """Run the clock as far as the warps have been executed, to the next question. Return its answer."""
        self._feed(is_whole=False)
        return self.engine.run()

    def _feed(self, is_whole: bool) -> None:
        assert self._trace is not None
        self.decoder.buffers = self._trace.buffers
        for place, steps in self._trace.warps.items():
            program, self._done[place] = self.decoder.program(place, steps, self._done.get(place, 0), is_whole)
            self.engine.extend(*place, program)
