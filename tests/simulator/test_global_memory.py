"""Global memory whose lanes access several buffers at once."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import GlobalMemory
from cute_mla.simulator.findings import Fault
from cute_mla.simulator.state.access import GlobalAccess

LANES = 32


@pytest.fixture
def storage() -> np.ndarray:
    """Return bytes, of which the buffers of `memory` are parts, at an address that vectors may have."""
    whole = np.arange(1024, dtype=np.uint8)
    return whole[-whole.ctypes.data % 16 :][:512]


@pytest.fixture
def memory(storage: np.ndarray) -> GlobalMemory:
    """Return memory with the bytes [0, 128), [160, 352), of which [208, 352) are not written, and [384, 512), which are read-only."""
    memory, first = GlobalMemory(), storage.ctypes.data
    memory.add("one", first, 128)
    written = np.ones(192, np.uint8)
    written[48:] = 0
    memory.add("two", first + 160, 192, initialised=False, written=written)
    memory.add("three", first + 384, 128, writable=False)
    return memory


def access(storage: np.ndarray, offsets: list[int], nbytes: int) -> GlobalAccess:
    return GlobalAccess(np.array(offsets, np.uint64) + np.uint64(storage.ctypes.data), nbytes)


def test_loads(memory: GlobalMemory, storage: np.ndarray) -> None:
    """Lane by lane the bytes of its own buffer, and what was not written is poison."""
    offsets = [(0, 200, 120, 400, 208, 344)[lane % 6] for lane in range(LANES)]
    values, poison = memory.load(access(storage, offsets, 8), 4)
    assert values.T.tobytes() == b"".join(storage[offset : offset + 8].tobytes() for offset in offsets)
    assert poison is not None
    assert poison.tolist() == [[208 <= offset < 352 for offset in offsets]] * 2


def test_part_of_an_access_may_be_poison(memory: GlobalMemory, storage: np.ndarray) -> None:
    written = memory.find(storage.ctypes.data + 160, storage.ctypes.data + 161)
    assert written is not None
    assert written.valid is not None
    written.valid[38] = 0  # a byte of the second element of lane 1
    _, poison = memory.load(access(storage, [0, 192, 208], 16), 4)
    assert poison is not None
    assert poison.T.tolist() == [[False] * 4, [False, True, False, False], [True] * 4]


def test_stores(memory: GlobalMemory, storage: np.ndarray) -> None:
    """The last one of lanes at one address wins, and what is stored is written from then on."""
    offsets = [(8, 216, 16, 216)[lane % 4] for lane in range(LANES)]
    before = storage.copy()
    memory.store(access(storage, offsets, 8), [np.arange(LANES, dtype=np.uint32), np.array(7, np.uint32)])
    expected = before.copy()
    for lane, offset in enumerate(offsets):
        expected[offset : offset + 8] = np.array([lane, 7], np.uint32).view(np.uint8)
    assert storage.tobytes() == expected.tobytes()
    _, poison = memory.load(access(storage, [0, 216, 208], 8), 8)
    assert poison is not None
    assert poison.tolist() == [[False, False, True]]


@pytest.mark.parametrize(
    ("offsets", "write", "message"),
    [
        ([0, 136, 400, 144], False, "read of 8 bytes .* 136 bytes from the start of 'one'"),
        ([0, 352, 168, 128], False, "read of 8 bytes .* 192 bytes from the start of 'two'"),
        ([0, 168, 400, 144], True, "16 bytes from the start of 'three' .* which is read-only"),
    ],
)
def test_the_first_lane_that_may_not_is_named(
    memory: GlobalMemory, storage: np.ndarray, offsets: list[int], write: bool, message: str
) -> None:
    wanted = access(storage, offsets, 8)
    with pytest.raises(Fault, match=message):
        memory.store(wanted, [np.zeros(4, np.uint64)]) if write else memory.load(wanted, 8)
