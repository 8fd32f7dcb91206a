"""Order of jobs over workers."""

from __future__ import annotations

from cute_mla.testing.job_queue import JobQueue


def test_a_worker_stays_with_its_kernel() -> None:
    queue = JobQueue([1, 5, 2, 4], ["a", "b", "a", "b"])
    assert [queue.take(0) for _ in range(5)] == [1, 3, 2, 0, None]


def test_workers_begin_with_different_kernels_the_costliest_first() -> None:
    queue = JobQueue([1, 2, 9, 4], ["a", "a", "b", "c"])
    assert [queue.take(worker) for worker in (0, 1, 2)] == [2, 3, 1]


def test_a_worker_without_a_kernel_of_its_own_helps_another() -> None:
    queue = JobQueue([3, 2, 1], ["a", "a", "a"])
    assert [queue.take(0), queue.take(1), queue.take(0), queue.take(1)] == [0, 1, 2, None]
