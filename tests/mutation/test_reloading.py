"""A mutant that a Reloader loads is the one that load_module loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import Entry, Module, PtxError, load_module
from cute_mla.simulator.codegen.control_flow import RegisterSet
from tests.mutation import numeric, reloading, sites
from tests.mutation.reloading import Reloader
from tests.mutation.sites import Mutation

KERNELS = {"cache_gather_sm90_bf16_fp8_656": 1, "combine_sm100_bf16": 1, "split_plan_sm90_i32": 3, "dense_decode_sm90_bf16_cluster2": 12}


def shipped(kernel: str) -> str:
    artifacts = load_artifacts()
    return artifacts.ptx(artifacts.manifest.kernels[kernel])


def one_of_each_kind(ptx: str) -> list[Mutation]:
    """Return the last site of each kind of mutation, which has most of the kernel in front of it."""
    return list({mutation.kind: mutation for mutation in [*sites.find(ptx), *numeric.find(ptx)]}.values())


def plain(value: object) -> str:
    """Return a value as text, without the numbers of nested scopes and of labels that stand for a guard."""
    return re.sub(r"(?<=\w)\.\d+(?=\b)|(?<=\$skip)\d+", "", str(value))


def names(registers: RegisterSet | None) -> list[str]:
    assert registers is not None
    return sorted(name for name, number in registers.layout.numbers.items() if registers.mask >> number & 1)


def blocks_of(entry: Entry) -> Iterator[list[Any]]:
    """Yield what each block does, with the source of its function."""
    for block in entry.flow.blocks:
        last = block.instructions[-1].spec.control == "bra"
        yield [
            (block.index, block.needs, block.successors, names(block.live), entry.translator.written(block, False).source),
            *((item.instruction.line, item.reads, item.writes, item.accumulators) for item in block.instructions),
            *(item.instruction for item in block.instructions[: -1 if last else None]),
        ]


def registers_of(entry: Entry) -> list[int]:
    """Return the registers of all instructions, each as the number of registers that were seen before it: scopes share none."""
    seen: dict[str, int] = {}
    items = [item for block in entry.flow.blocks for item in block.instructions]
    return [seen.setdefault(register.name, len(seen)) for item in items for register in (*item.reads, *item.writes, *item.accumulators)]


def assert_equal(one: Module, other: Module) -> None:
    (first,), (second,) = one.entries.values(), other.entries.values()
    for mine, whole in zip(blocks_of(first), blocks_of(second), strict=True):
        assert mine == whole or plain(mine) == plain(whole)
    assert registers_of(first) == registers_of(second)
    of_entry = [
        (entry.name, entry.params, entry.reqntid, plain(sorted(entry.undefined)), plain(entry.findings), entry.flow.tensor_fences)
        for entry in (first, second)
    ]
    assert of_entry[0] == of_entry[1]
    targets = [sorted((plain(name), block) for name, block in entry.flow.targets.items()) for entry in (first, second)]
    assert targets[0] == targets[1]


@pytest.mark.parametrize(("kernel", "step"), KERNELS.items())
def test_reloaded_mutants_are_those_loaded_whole(kernel: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = shipped(kernel)
    reloader = Reloader(ptx)
    monkeypatch.setattr(reloading, "load_module", None)  # nothing is loaded whole
    mutants = [mutation.apply(ptx) for mutation in one_of_each_kind(ptx)[::step]]
    everywhere = sites.apply_all(ptx, [site for site in sites.find(ptx) if site.kind.endswith(" deleted")])
    shifted = re.sub(r"\{(?=\s*\.reg \.pred +P1;)", "{}{", ptx, count=1)  # its scope has the number that the next one has in the kernel
    for text in (ptx, everywhere, shifted, *mutants):
        assert_equal(reloader.load(text), load_module(text))


def numbers(function: Any) -> list[int]:
    """Return the numbers that a function of a block is given: rows of registers, and the blocks that it leads to."""
    return [value for value in function.__defaults__ if isinstance(value, int)]


def test_functions_of_a_mutant_lead_to_its_own_blocks() -> None:
    """A deleted barrier joins two blocks: those behind it have other numbers than in the kernel, and the same source."""
    ptx = shipped("split_plan_sm90_i32")
    reloader = Reloader(ptx)
    for text in (ptx, sites.find(ptx)[0].apply(ptx)):
        (first,), (second,) = (module.entries.values() for module in (reloader.load(text), load_module(text)))
        for one, other in zip(first.flow.blocks, second.flow.blocks, strict=True):
            for tainted in (False, True):
                assert numbers(first.translator.compile(one, tainted)) == numbers(second.translator.compile(other, tainted))
    assert len(reloader.written) < 3 * len(second.flow.blocks), "blocks of the mutant were written anew"


@pytest.mark.parametrize(
    "edit", [(".reg .pred \t%p<", ".reg .pred \t%q<"), ("ret;", "retire;"), ("ret;", "ret"), ("\n", "\n\n"), ("ret;", "{ ret;")]
)
def test_texts_that_are_no_mutants_are_loaded_whole(edit: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(reloading, "load_module", loaded.append)
    ptx = shipped("combine_sm90_bf16")
    text = ptx.replace(*edit)
    assert text != ptx
    Reloader(ptx).load(text)
    assert loaded == [text]


def test_errors_are_those_of_a_text_loaded_whole() -> None:
    ptx = shipped("combine_sm90_bf16")
    with pytest.raises(PtxError, match=rf"PTX line {ptx[: ptx.index('ret;')].count(chr(10)) + 1}: unknown predicate %nothing"):
        Reloader(ptx).load(ptx.replace("ret;", "@%nothing ret;"))
