"""Batch invariance as a contract: a request has the same bits alone, in any batch, on any device size, wherever its keys lie.

Every kernel of the closed list is held to it; see contracts.py for what a request is, op by op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.aot_build.variants import OPS, Variant, closed_variants
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.testing.compare import same_bits
from cute_mla.testing.operations import operation
from tests.ops.batch_invariance.contracts import CONTRACTS, CUT_CONTRACTS, WITHIN, Contract
from tests.support.bench import Bench, Result, identical


@dataclass(frozen=True)
class Arrangement:
    """A call of some of the requests, in this order, on so many SMs. moved: as in Operation.taken."""

    picks: tuple[int, ...]
    sm_count: int
    moved: bool = False


def arrangements(requests: int) -> tuple[Arrangement, ...]:
    """Return one request alone; all of them shuffled; and twice as many, everything moved."""
    everyone = tuple(range(requests))
    shuffled = tuple(sorted(everyone, key=lambda request: (request * 3 + 1) % requests))
    return Arrangement((0,), 14), Arrangement(shuffled, 1), Arrangement((*everyone[1:], *everyone[::-1], 0), 5, moved=True)


def on_every_device(requests: int) -> tuple[Arrangement, ...]:
    """Return every request alone, and all of them, on small devices and on those that there are."""
    alone = tuple(Arrangement((request,), 7) for request in range(requests))
    return *alone, *(replace(others, sm_count=count) for count in (2, 8, 132, 148) for others in arrangements(requests)[1:])


def broken(contract: Contract, bench: Bench, case: Any, wanted: tuple[Arrangement, ...]) -> Iterator[tuple[Arrangement, int]]:
    """Return the calls and requests whose bits differ from a call of all requests, which is itself correct."""
    operands, of = operation(case).make_tensors(case, "cpu"), operation(case).of
    everyone = tuple(range(operation(case).requests(case)))
    whole, together = run(contract, bench, case, operands, Arrangement(everyone, case.sm_count))
    contract.expect(*whole, together, bench.arch)
    for arrangement in wanted:
        call, results = run(contract, bench, case, operands, arrangement)
        for place, request in enumerate(arrangement.picks):
            if not identical(of(*call, results, place), of(*whole, together, request)):
                yield arrangement, request


def run(contract: Contract, bench: Bench, case: Any, operands: Any, arrangement: Arrangement) -> tuple[tuple[Any, Any], Result]:
    """Return the case and operands of an arrangement, and its results."""
    call, own = operation(case).taken(case, operands, arrangement.picks, arrangement.moved)
    call = replace(call, sm_count=arrangement.sm_count)
    return (call, own), contract.run(bench, call, own)


def variants(contracts: dict[str, Contract]) -> list[Any]:
    """List the kernel variants of these contracts' ops, on every architecture.

    For each op and kind of operands the first variant runs in `make test`; the others are marked slow.
    """
    found, seen = [], set()
    for arch in ARCHS.values():
        for variant in closed_variants(arch, tuple(contracts)):
            if variant.op == "dense_decode" and getattr(variant.config, "few_heads", False):
                continue  # which batch-invariant calls do not take
            kind = (variant.op, arch.name, *(getattr(variant.config, name, None) for name in ("cache", "operands")))
            found.append(pytest.param(variant, id=variant.name, marks=[pytest.mark.slow] if kind in seen else []))
            seen.add(kind)
    return found


def of_every_type(op: str) -> list[Any]:
    """Return the first variant of every architecture, type and kind of operands."""
    found: dict[tuple[Any, ...], Variant] = {}
    for arch in ARCHS.values():
        for variant in closed_variants(arch, (op,)):
            kind = (arch.name, *(getattr(variant.config, name, None) for name in ("dtype", "cache", "operands")))
            found.setdefault(kind, variant)
    return [pytest.param(variant, id=variant.name) for variant in found.values()]


def test_every_op_has_a_contract() -> None:
    assert {*CONTRACTS, *WITHIN} == set(OPS)
    assert not CONTRACTS.keys() & WITHIN.keys()
    assert CUT_CONTRACTS.keys() == {op for op, contract in CONTRACTS.items() if contract.flag}
    assert {op for ops in WITHIN.values() for op in ops} <= CONTRACTS.keys()
    assert {*WITHIN["split_plan"], *WITHIN["combine"]} <= CUT_CONTRACTS.keys()


@pytest.mark.in_turn
@pytest.mark.parametrize("variant", variants(CONTRACTS))
def test_a_request_has_its_own_bits(variant: Variant) -> None:
    contract = CONTRACTS[variant.op]
    case = contract.case_for(variant.arch, variant.config)
    assert getattr(case, "batch_invariant", False) == contract.flag
    assert not list(broken(contract, Bench(variant.arch), case, arrangements(operation(case).requests(case))))


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(CONTRACTS))
def test_a_request_has_its_own_bits_on_every_device(variant: Variant) -> None:
    contract = CONTRACTS[variant.op]
    case = contract.case_for(variant.arch, variant.config)
    assert not list(broken(contract, Bench(variant.arch), case, on_every_device(operation(case).requests(case))))


@pytest.mark.parametrize("op", CUT_CONTRACTS)
def test_a_request_that_is_cut_has_its_own_bits(op: str) -> None:
    contract, variant = CUT_CONTRACTS[op], closed_variants(next(iter(ARCHS.values())), (op,))[0]
    case = contract.case_for(variant.arch, variant.config)
    assert not list(broken(contract, Bench(variant.arch), case, (Arrangement((0,), 14, moved=True),)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [variant for op in CUT_CONTRACTS for variant in of_every_type(op)])
def test_a_request_that_is_cut_has_its_own_bits_in_every_type(variant: Variant) -> None:
    contract = CUT_CONTRACTS[variant.op]
    case = contract.case_for(variant.arch, variant.config)
    assert not list(broken(contract, Bench(variant.arch), case, arrangements(operation(case).requests(case))))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_a_token_of_dense_decode_has_its_own_bits_in_any_division_of_its_request(arch: Arch) -> None:
    """Tokens whose last keys lie on both sides of a cut, in one call and each on its own."""
    heads, first, total, draw = 16, 8191, 8194, torch.Generator().manual_seed(0)
    cache = torch.randn(129, 64, 1, 576, generator=draw).bfloat16()
    q = torch.randn(total - first, heads, 576, generator=draw).bfloat16()
    pages = torch.randperm(129, generator=draw)[None].int()

    def attended(begin: int, end: int) -> Tensor:
        length, starts = torch.tensor([end], dtype=torch.int32), torch.tensor([0, end - begin], dtype=torch.int32)
        plan = cute_mla.get_mla_metadata(length, (end - begin) * heads, 1, heads, cu_seqlens_q=starts, total_q=end - begin)
        return cute_mla.flash_mla_with_kvcache(
            q[begin - first : end - first],
            cache,
            pages,
            length,
            512,
            *plan,
            causal=True,
            batch_invariant=True,
            cu_seqlens_q=starts,
            max_seqlen_q=end - begin,
        )[0]

    with cute_mla.simulate(arch, 6):
        assert same_bits(torch.cat([attended(token, token + 1) for token in range(first, total)]), attended(first, total))


@pytest.mark.in_turn
@pytest.mark.parametrize("op", CUT_CONTRACTS)
def test_a_plan_that_depends_on_the_sm_count_breaks_the_contract(arch: Arch, op: str) -> None:
    """Plans of calls without the flag depend on the SM count."""
    contract, variant = CONTRACTS[op], closed_variants(arch, (op,))[0]
    case = replace(contract.case_for(arch, variant.config), batch_invariant=False)
    assert list(broken(contract, Bench(arch), case, arrangements(operation(case).requests(case))))
