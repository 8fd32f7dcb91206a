"""The machine code of built kernels: equal to their PTX in every byte of memory, under two schedules, and refused where it is unknown."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.manifest import MANIFEST_NAME, KernelEntry
from cute_mla.runtime import simulated_device
from cute_mla.runtime.artifacts import FOLDER_VARIABLE, Artifacts, artifacts_folder
from cute_mla.runtime.errors import ArtifactError
from cute_mla.simulator.findings import SassError, SimulationError, UnsupportedInstruction
from cute_mla.simulator.sass import disassembler
from cute_mla.simulator.sass.cubin import CubinError, read_cubin
from cute_mla.simulator.sass.listing import read_listing
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.simulator.sass.text_cache import disassembly
from cute_mla.spec.arch import SM90, SM100, Arch
from cute_mla.spec.dense_decode import FP8, FP8_CACHE
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.runner import call
from cute_mla.testing.suite import suite
from tests.simulator.both_codes import both_codes

CASES = ("merge_states", "mqa_logits", "topk_indices", "index_write", "cache_write", "cache_insert", "cache_gather", "dense_decode")
ATTENTION = ("dense_prefill", "sparse_prefill", "sparse_decode", "dense_decode")
COVERED = ("merge_states", "mqa_logits", "topk_indices", "index_write", "cache_", "split_plan", "combine")
MAX_TILES = 6


def near_case(op: str) -> BaseCase:
    """Return the largest of the smallest cases of both architectures, without memory too far apart to copy, and without findings."""
    entries = [entry.case for name in ("quick", "smoke") for entry in suite(name, op, simulated=True) if entry.mode != "skipped"]
    cases = [case for case in entries if 1 <= case.tiles <= MAX_TILES and not re.search("far|broken|overwritten", case.id)]
    cases = [case for case in cases if case.runs_on(SM90) and case.runs_on(SM100)]
    found: BaseCase = max(cases, key=lambda case: (case.tiles, case.id))
    return found


def in_turn(cases: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the ops, each with the schedule that runs warps in turn."""
    return [(op, "round_robin") for op in cases]


def same_bytes(arch: Arch | str, case: BaseCase, schedule: str, *ops: str) -> None:
    """Check that kernels of a call leave the bytes that their PTX leaves, without findings."""
    tensors = operation(case).make_tensors(case, "cpu")
    with cute_mla.simulate(arch, case.sm_count, schedule=schedule), both_codes(*ops) as launches:
        call(case, tensors)
    assert launches.kernels
    assert not launches.findings
    assert not launches.differing
    assert not launches.unchecked


@pytest.mark.parametrize(("op", "schedule"), [*in_turn(CASES), ("merge_states", "adversarial"), ("cache_write", "random")])
def test_a_built_kernel_gives_the_bytes_of_its_ptx(arch: Arch, op: str, schedule: str) -> None:
    same_bytes(arch, near_case(op), schedule, *COVERED)


OTHER_SCHEDULES = {
    "sm90": [("dense_prefill", "adversarial"), ("dense_decode", "lazy")],
    "sm100": [("sparse_decode", "adversarial"), ("dense_prefill", "lazy"), ("dense_decode", "random")],
}


@pytest.mark.parametrize(
    ("name", "op", "schedule"), [(name, *run) for name, others in OTHER_SCHEDULES.items() for run in (*in_turn(ATTENTION), *others)]
)
def test_an_attention_kernel_gives_the_bytes_of_its_ptx(name: str, op: str, schedule: str) -> None:
    same_bytes(name, near_case(op), schedule, op)


@pytest.mark.parametrize("operands", [FP8, FP8_CACHE])
def test_decode_over_e4m3_gives_the_bytes_of_its_ptx(arch: Arch, operands: str) -> None:
    """On SM90 a product whose A is in registers has a descriptor of A in two uniform registers, one of which no instruction may write."""
    same_bytes(arch, DenseDecodeCase(lengths=(70,), h_q=3, operands=operands, sm_count=2), "round_robin", "dense_decode")


MUTATIONS = {  # each at every place of its pattern
    "a wait for products left out": (r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", "NOP"),
    "the fence before wgmma left out": (r"FENCE\.VIEW\.ASYNC\.S(?= )", "NOP"),
    "a phase test that always succeeds": (
        r"SYNCS\.PHASECHK\.TRANS64\.TRYWAIT (P\d), [^;]*?(?= ;)",
        r"PLOP3.LUT \1, PT, PT, PT, PT, 0x80, 0x0",
    ),
    "an arrival left out": (r"SYNCS\.ARRIVE\.TRANS64\.A1T0 RZ, [^;]*?(?= ;)", "NOP"),
    "expected bytes left out": (r"SYNCS\.ARRIVE\.TRANS64 RZ, (\S+), R\d+", r"SYNCS.ARRIVE.TRANS64.A1T0 RZ, \1, RZ"),
    "a named barrier left out": (r"BAR\.SYNC\.DEFER_BLOCKING 0x0", "NOP"),
    "a maximum for a minimum": (r"VIMNMX (R\d+), (R\d+), (\S+), PT", r"VIMNMX \1, \2, \3, !PT"),
    "another lane read": (r"(SHFL\.BFLY PT, R\d+, R\d+), 0x1,", r"\1, 0x4,"),
    "another register multiplied": (r"FMUL (R\d+), R\d+, (R\d+)", r"FMUL \1, \2, \2"),
    "a selection reversed": (r"FSEL (.*), P0(?= )", r"FSEL \1, !P0"),
    "A and B exchanged": (r"(HGMMA\S+ R\d+), gdesc\[UR(\d+)\]", r"\1, gdesc[UR\2].tnspA"),
    "an accumulator cleared": (r"(HGMMA.*), R24, gsb0", r"\1, RZ, !UPT, gsb0"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_machine_code_is_noticed(mutation: str) -> None:
    pattern, replacement = MUTATIONS[mutation]
    changed: list[int] = []

    def broken(text: str) -> str:
        found, count = re.subn(pattern, replacement, text)
        changed.append(count)
        return found

    case = near_case("dense_prefill")
    tensors = operation(case).make_tensors(case, "cpu")
    with cute_mla.simulate("sm90", case.sm_count, schedule="lazy"), both_codes("dense_prefill", edit=broken) as launches:
        call(case, tensors)
    assert changed[0] > 0
    assert launches.findings or launches.differing


def merged(**options: Any) -> torch.Tensor:
    """Merge two states of attention on the simulated device."""
    generator = torch.Generator().manual_seed(3)
    outs = [torch.randn(5, 4, 128, generator=generator).to(torch.bfloat16) for _ in range(2)]
    lses = [torch.randn(5, 4, generator=generator) for _ in range(2)]
    with cute_mla.simulate("sm90", **options):
        return cute_mla.merge_states(torch.stack(outs), torch.stack(lses))[0]


def test_simulate_runs_machine_code_without_the_ptx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = merged()
    for path in (artifacts_folder() / MANIFEST_NAME, *artifacts_folder().glob("merge_states_*.cubin")):
        shutil.copyfile(path, tmp_path / path.name)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(simulated_device, "_modules", {})  # the kernels loaded so far
    with pytest.raises(ArtifactError, match=r"cannot read .*merge_states_sm90_bf16_d128\.ptx"):
        merged()
    assert torch.equal(merged(code="sass"), expected)


def test_codes_that_simulate_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="code is 'cuda'; supported: ptx, sass"):
        merged(code="cuda")


def test_without_nvdisasm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembler, "find_program", lambda name: None)
    with pytest.raises(SassError, match=r"not found; install nvidia-cuda-nvdisasm \(the build extra\)"):
        disassembler.disassemble(b"")


def test_a_cubin_whose_wait_was_removed_is_a_finding_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing built it, so no gate of the build has seen its control codes."""
    read = Artifacts.cubin

    def without_a_wait(self: Artifacts, entry: KernelEntry) -> bytes:
        cubin = read(self, entry)
        text = read_cubin(cubin).sections[f".text.{entry.entry}"]
        listing = read_listing(disassembly(cubin))
        load = next(ins for ins in listing.instructions if ins.base == "S2R")
        behind = listing.instructions[load.address // 16 :]
        use = next(ins for ins in behind if ins.control.waits >> load.control.write_board & 1)
        high = use.address + 8
        changed = int.from_bytes(text[high : high + 8], "little") & ~(63 << 52)
        return cubin.replace(text, text[:high] + changed.to_bytes(8, "little") + text[high + 8 :])

    monkeypatch.setattr(Artifacts, "cubin", without_a_wait)
    monkeypatch.setattr(simulated_device, "_modules", {})
    with pytest.raises(SimulationError, match=r"control_code: it waits for no scoreboard that guards .*, result of 0x.* S2R"):
        merged(code="sass")


def kernel(name: str) -> tuple[bytes, str]:
    cubin = (artifacts_folder() / f"{name}.cubin").read_bytes()
    return cubin, disassembly(cubin)


def test_unknown_opcodes_and_operands_are_listed() -> None:
    cubin, text = kernel("merge_states_sm90_bf16_d512")
    with pytest.raises(UnsupportedInstruction) as error:
        load_machine_code(
            cubin, text.replace("MUFU.RCP", "MUFU.COS").replace("MUFU.EX2", "MUFU.SIN").replace("c[0x0][0x28]", "c[0x0][0x30]")
        )
    for part in ("MUFU.COS (at 0x", "MUFU.SIN (at 0x", "constant bank 0 at 0x30: meaning unknown"):
        assert part in str(error.value)


def test_a_listing_of_another_cubin_is_refused() -> None:
    cubin, _ = kernel("merge_states_sm90_bf16_d512")
    with pytest.raises(SassError, match="the disassembly is of merge_states_sm90_bf16_d128_0"):
        load_machine_code(cubin, kernel("merge_states_sm90_bf16_d128")[1])
    with pytest.raises(CubinError):
        load_machine_code(b"\x7fELF", "")
