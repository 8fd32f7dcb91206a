"""Predictions of benchmark rows by the clock: nominal, and with every constant at its fast and at its slow end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.errors import ArtifactError
from cute_mla.simulator import SimulationError

from ..kernel_stats.dynamic_counts import keys_of_block
from ..launches.launch import Combine, Launch, NoLaunchError
from ..launches.of_rows import launch_on
from ..roofline import GPUS, roof
from ..rows import Case
from ..shapes import SparsePrefillShape
from .constants import FAST, NOMINAL, SLOW, Constants, constants
from .engine import Setting, StandstillError
from .grid import RowTime, binding_unit, hbm_share, in_sequence, row_time, stream_setting_share, stream_time
from .instructions import UnknownTimeError
from .kernel_times import KernelTimes, is_cold, kernel_times, seam_clocks
from .streams import clocks_after, combine_clocks, stream_clocks

ENDS = (NOMINAL, FAST, SLOW)
REFUSALS = (UnknownTimeError, StandstillError, NoLaunchError, SimulationError, ArtifactError)


@dataclass(frozen=True)
class LaunchClocks:
    """Clocks of one launch of a row, from runs of a cluster.

    kernel: of a launch over keys, else None. seam: 0 if no CTA has two pieces. stream: of one CTA of the stream, or of what follows the
    launch over keys; None if nothing does.
    """

    kernel: KernelTimes | None
    seam: float
    stream: float | None


def setting_of(case: Case, launch: Launch, entry: KernelEntry, constants: Constants) -> Setting:
    """Return the circumstances of a cluster in a row: its share of HBM, and whether keys come from there.

    Keys of dense prefill and of logits in a row are read by many CTAs, and rows of sparse prefill by many tokens: they come from L2 as far
    as it holds them.
    """
    share = hbm_share(constants, launch, prod(entry.cluster))
    if is_cold(entry):
        return Setting(share, rows=launch.rows)
    missing = 0.0
    if isinstance(case.shape, SparsePrefillShape):
        latent = 2.0 * case.shape.d_qk * case.shape.s_kv
        missing = max(1 - constants.l2_mbytes * 1e6 / latent, 0.0)
    share = constants.hbm_bytes / max(launch.ctas, 1)
    return Setting(min(share / missing, float(constants.l2_bytes)) if missing else share, cold=missing > 0)


def launches_over_keys(launch: Launch) -> tuple[Launch, ...]:
    """Return the launches over keys of a call, in their order."""
    return (launch,) if launch.after is None else (launch, launch.after)


def row_clocks(case: Case, gpu: str, end: str) -> tuple[LaunchClocks, ...]:
    """Run the kernels of a row with the constants of a GPU at one end. One of REFUSALS, with the reason, for a row that cannot be timed."""
    values = constants(gpu, end)
    launch = launch_on(case, gpu)
    if isinstance(launch, Combine):
        setting = Setting(stream_setting_share(launch, values), cold=launch.cold)
        one = combine_clocks(launch, case.dtype, values, setting) if case.op == "combine" else stream_clocks(case, values, setting)
        return (LaunchClocks(None, 0.0, one),)
    return tuple(_clocks(case, each, values, end) for each in launches_over_keys(launch))


def _clocks(case: Case, launch: Launch, values: Constants, end: str) -> LaunchClocks:
    entry = load_artifacts().manifest.kernels.get(launch.kernel)
    if entry is None:
        raise ArtifactError(f"{launch.kernel} is not built")
    setting = setting_of(case, launch, entry, values)
    times = kernel_times(entry, values, setting)
    has_seams = any(work.pieces > 1 for work in launch.cta_work)
    seam = seam_clocks(entry, values, setting, times) if has_seams else 0.0
    after = combine_after(launch, values, end)
    if after is None:
        return LaunchClocks(times, seam, None)
    return LaunchClocks(times, seam, clocks_after(case, after, values, Setting(stream_setting_share(after, values), cold=after.cold)))


def combine_after(launch: Launch, values: Constants, end: str) -> Combine | None:
    """Return what follows a launch over keys: cold at the slow end, or if L2 cannot hold the partial results."""
    if launch.combine is None:
        return None
    return replace(launch.combine, cold=end == SLOW or launch.combine.bytes > values.l2_mbytes * 1e6)


def time_of(case: Case, gpu: str, end: str, clocks: Sequence[LaunchClocks]) -> tuple[RowTime, int]:
    """Return the time of a row from the clocks of its launches, and the index of the longest launch."""
    values, launch = constants(gpu, end), launch_on(case, gpu)
    if isinstance(launch, Combine):
        (one,) = clocks
        assert one.stream is not None
        return stream_time(launch, one.stream, values), 0
    times = []
    for each, found in zip(launches_over_keys(launch), clocks, strict=True):
        assert found.kernel is not None
        with_combine = replace(each, combine=combine_after(each, values, end))
        times.append(row_time(with_combine, found.kernel, found.seam, values, found.stream))
    longest = max(range(len(times)), key=lambda number: times[number].us)
    return (in_sequence(times[0], times[1], values) if len(times) > 1 else times[0]), longest


def clock_of(case: Case, gpu: str) -> dict[str, Any]:
    """Return the prediction of a row on a GPU, or {"reason": why there is none}."""
    try:
        clocks = {end: row_clocks(case, gpu, end) for end in ENDS}
    except REFUSALS as reason:
        return {"reason": str(reason)}
    times = {end: time_of(case, gpu, end, clocks[end]) for end in ENDS}
    us = [time.us for time, _ in times.values()]
    nominal, longest = times[NOMINAL]
    found: dict[str, Any] = {
        "us": us[0],
        "low_us": min(us),
        "high_us": max(us),
        "ghz": nominal.ghz,
        "binds": nominal.binds,
        "fraction_of_roof": roof(case.work, GPUS[gpu]).us / us[0],
        "terms": dict(nominal.terms),
        "kernel": None,
    }
    launch = launch_on(case, gpu)
    if isinstance(launch, Launch):
        entry = load_artifacts().manifest.kernels[launches_over_keys(launch)[longest].kernel]
        found |= _kernel_fields(entry, [clocks[end][times[end][1]] for end in ENDS])
    return found


def _kernel_fields(entry: KernelEntry, ends: Sequence[LaunchClocks]) -> dict[str, Any]:
    kernels = [end.kernel for end in ends if end.kernel is not None]
    nominal, blocks = kernels[0], [kernel.block for kernel in kernels]
    return {
        "kernel": entry.name,
        "keys_of_block": keys_of_block(entry),
        "block_clocks": {"nominal": nominal.block, "low": min(blocks), "high": max(blocks)},
        "fixed_clocks": nominal.fixed,
        "seam_clocks": ends[0].seam,
        "use": dict(nominal.use),
        "binding_unit": binding_unit(nominal),
        "waits": {role: dict(shares) for role, shares in nominal.waits.items()},
    }
