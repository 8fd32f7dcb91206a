"""A fixed sample of the mutations of tests/mutation: one of each kind, in a kernel of every op and architecture. `make mutate` has all.

`make test` breaks five; tests/mutation/planted has bugs in the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from tests.mutation.bench import Subject, processes
from tests.mutation.campaign import Line, judge_sample
from tests.mutation.report import FLOORS, REASONS, below_floors, explanations, floor_of, unexplained
from tests.mutation.sites import KINDS, find

KERNELS = (  # those without planted bugs, one with products of warpgroups, one with tensor memory
    "combine_sm90_bf16",
    "split_plan_sm90_i32",
    "merge_states_sm100_bf16_d128",
    "dense_decode_sm90_bf16_cluster2",
    "dense_prefill_sm100_bf16_d192",
)
OTHERS = (
    "dense_decode_sm100_bf16_cluster2",
    "sparse_decode_sm90_bf16_latent_cluster2",
    "sparse_decode_sm100_bf16_latent_cluster2",
    "sparse_prefill_sm90_bf16_d576_cluster1",
    "sparse_prefill_sm100_bf16_d576_cluster2",
    "dense_prefill_sm90_bf16_d192",
    "dense_prefill_dq_sm90_bf16_d192",
    "dense_prefill_dq_sm100_bf16_d192",
    "dense_prefill_dkdv_sm90_bf16_d192",
    "dense_prefill_dkdv_sm100_bf16_d192",
    "mqa_logits_sm90_e4m3_pages_h32",
    "topk_indices_sm90_fp32_cluster8",
    "index_write_sm100_bf16_keys",
    "cache_write_sm90_bf16_fp8_656",
    "cache_insert_sm90_bf16_latent",
    "cache_gather_sm100_b16_latent",
)
SNIPPET = """
@%p1 mbarrier.arrive.shared.b64 _, [%r1]; // mbarrier.arrive in a comment
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r2;
wait: mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r3, 100;
wgmma.wait_group.sync.aligned 0;
wgmma.fence.sync.aligned;
@!%p2 cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];
"""


EXPLAINED = explanations(REASONS["synchronisation"])


def is_explained(line: Line) -> bool:
    return any(item.covers(line) for item in EXPLAINED)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Yield a process that limits its memory, and ends runs at the first finding."""
    with processes(1) as pool:
        yield pool


@pytest.mark.parametrize("kernel", [*KERNELS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_broken_kernels_are_noticed(pool: ProcessPoolExecutor, kernel: str) -> None:
    lines = pool.submit(judge_sample, kernel, 1, 0, 1, is_explained).result()
    assert lines
    assert unexplained(lines, EXPLAINED) == []
    assert "no case" not in {line.noticed for line in lines}


def test_what_is_broken_and_how() -> None:
    broken = {(mutation.kind, mutation.line): mutation.apply(SNIPPET).splitlines()[mutation.line - 1].strip() for mutation in find(SNIPPET)}
    assert broken == {
        ("arrive deleted", 2): "// mbarrier.arrive in a comment",
        ("expect_tx deleted", 3): "",
        ("expect_tx without bytes", 3): "mbarrier.arrive.shared.b64 _, [%r1];",
        ("expect_tx of 16 bytes", 3): "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;",
        ("phase not waited for", 4): "wait: setp.eq.u32 P1, 0, 0;",
        ("wgmma wait deleted", 5): "",
        ("wgmma wait 1 looser", 5): "wgmma.wait_group.sync.aligned 1;",
        ("wgmma.fence deleted", 6): "",
        ("copies' arrive deleted", 7): "",
    }


def test_places_are_roles_and_rings() -> None:
    """survivors.toml identifies mutations by these places."""
    subject = Subject(load_artifacts().manifest.kernels["dense_prefill_sm90_bf16_d192"])
    places = subject.places.of_all(find(subject.text))
    waits = {place for mutation, place in places.items() if mutation.kind == "phase not waited for"}
    assert {"keys: key_free #0", "values: value_free #0", "queries: query_free #1", "attend_0+attend_1: key_ready #0"} <= waits
    assert "all #0" in {place for mutation, place in places.items() if mutation.kind == "grid wait deleted"}


def test_kinds_and_explanations_are_about_some_kernel() -> None:
    """Else a pattern is out of date. A kernel is searched for what none before it had."""
    artifacts = load_artifacts()
    unseen, known = set(KINDS), EXPLAINED
    for name, entry in artifacts.manifest.kernels.items():
        about = [item for item in known if item.kernel.fullmatch(name)]
        asked = [kind for kind in KINDS if kind in unseen or any(item.kind.fullmatch(kind.name) for item in about)]
        ptx = artifacts.ptx(entry) if asked else ""
        own = {kind for kind in asked if kind.sites(ptx)}
        unseen -= own
        known = [item for item in known if item not in about or not any(item.kind.fullmatch(kind.name) for kind in own)]
    assert unseen == set()
    assert known == []


def test_floors_hold_kernels_with_enough_records() -> None:
    """Every kernel that ships has one, but for an op that was not measured; and every floor is that of a kernel."""
    kernels = load_artifacts().manifest.kernels
    assert {floor_of(name, FLOORS)[0] for name in kernels} == {"", *FLOORS}
    unmeasured = {"split_plan", "key_lists", "row_statistics", "row_sums", "head_sums", "indexer_backward"}
    assert {entry.op for name, entry in kernels.items() if floor_of(name, FLOORS)[0] == ""} == unmeasured
    assert all(0.5 < floor <= 1 for floor in FLOORS.values())
    floors = {"combine": 0.5, "combine_sm90": 0.7}
    lines = [Line("combine_sm90_bf16", "", "", number, "", 0, "", "answer" * (number % 3 > 0), "", "") for number in range(60)]
    assert below_floors(lines, floors) == ["combine_sm90_bf16: 40 of 60 noticed, floor: 70%"]
    assert below_floors(lines[:59], floors) == below_floors(lines, {"combine": 0.66}) == []
