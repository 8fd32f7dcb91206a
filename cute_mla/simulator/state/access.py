"""Access patterns: properties of a load or store that depend on its addresses only, computed once.

The same addresses come back in every iteration of a kernel's loops. Patterns of shared memory are cached by the bytes of the addresses,
patterns of global memory by the distances from the first address.
"""

from __future__ import annotations

import numpy as np

WORD = 4
MAX_PATTERNS = 2048  # of each kind, some 5 KB each

_RANK_SHIFT = np.uint32(24)
_OFFSET_MASK = np.uint32(0xFFFFFF)


def all_true(mask: np.ndarray) -> bool:
    """Return whether all elements of a bool array are true; on small arrays several times as fast as mask.all()."""
    return np.count_nonzero(mask) == mask.size


class SharedPattern:
    """Shared addresses of accesses. rank: CTA rank of all of them, or None where they differ. low, high: least and largest offset.

    bits: all bits that are set in any offset. Arrays are not to be written to.
    """

    __slots__ = ("_distinct", "_index", "_masks", "_words", "bits", "high", "low", "offsets", "rank", "ranks")

    def __init__(self, address: np.ndarray) -> None:
        self.ranks = address >> _RANK_SHIFT
        first = int(self.ranks[0])
        self.rank = first if all_true(self.ranks == first) else None
        self.offsets = (address & _OFFSET_MASK).astype(np.int64)
        self.low, self.high = int(self.offsets.min()), int(self.offsets.max())
        self.bits = int(np.bitwise_or.reduce(self.offsets))
        self._index: dict[int, np.ndarray] = {}
        self._words: dict[int, np.ndarray] = {}
        self._masks: dict[int, np.ndarray] = {}
        self._distinct: dict[int, bool] = {}

    @property
    def is_same(self) -> bool:
        """Return whether all addresses are equal."""
        return self.rank is not None and self.low == self.high

    def part(self, where: np.ndarray | slice) -> SharedPattern:
        """Return the pattern of some of the accesses, which are all to one CTA."""
        assert self.rank is not None
        return shared_pattern((self.offsets[where] | self.rank << 24).astype(np.uint32))

    def index(self, size: int) -> np.ndarray:
        """Return the offsets in units of size bytes."""
        found = self._index.get(size)
        if found is None:
            found = self._index[size] = self.offsets // size
        return found

    def words(self, nbytes: int) -> np.ndarray:
        """Return the words that accesses of nbytes touch: (accesses, words)."""
        found = self._words.get(nbytes)
        if found is None:
            found = self._words[nbytes] = self.index(WORD)[:, None] + np.arange(max(nbytes // WORD, 1))
        return found

    def distinct(self, nbytes: int) -> bool:
        """Return whether no word is touched by two of the accesses."""
        found = self._distinct.get(nbytes)
        if found is None:
            words = self.words(nbytes)
            found = self._distinct[nbytes] = len(np.unique(words)) == words.size
        return found

    def part_masks(self, nbytes: int) -> np.ndarray:
        """Return which bytes of its word each access of nbytes < 4 touches: (accesses, 1) bit masks."""
        found = self._masks.get(nbytes)
        if found is None:
            found = self._masks[nbytes] = (((1 << nbytes) - 1) << (self.offsets & 3))[:, None].astype(np.uint8)
        return found


class GlobalPattern:
    """Distances of global addresses from the first one. low, high: the least and the largest. bits: all bits set in any distance."""

    __slots__ = ("_dense", "_index", "bits", "distances", "high", "low")

    def __init__(self, distances: np.ndarray) -> None:
        self.distances = distances
        self.low, self.high = int(distances.min()), int(distances.max())
        self.bits = int(np.bitwise_or.reduce(distances))
        self._index: dict[tuple[int, int], np.ndarray] = {}
        self._dense: dict[tuple[int, int], bool] = {}

    def index(self, size: int, count: int) -> np.ndarray:
        """Return count consecutive units of size bytes of each access, counted from the lowest address: (accesses, count)."""
        found = self._index.get((size, count))
        if found is None:
            first = (self.distances - self.low) // size
            found = self._index[size, count] = first[:, None] + np.arange(count)
        return found

    def dense(self, size: int, count: int) -> bool:
        """Return whether these units are a whole range, in ascending order."""
        found = self._dense.get((size, count))
        if found is None:
            index = self.index(size, count).ravel()
            found = self._dense[size, count] = bool((index == np.arange(index.size)).all())
        return found


class GlobalAccess:
    """Accesses of nbytes each at global addresses (uint64, one per lane). low, high: the bytes [low, high) that hold all of them."""

    __slots__ = ("addresses", "aligned", "high", "low", "nbytes", "pattern")

    def __init__(self, addresses: np.ndarray, nbytes: int) -> None:
        self.addresses = addresses
        self.nbytes = nbytes
        self.pattern = pattern = global_pattern(addresses)
        first = int(addresses[0])
        self.low, self.high = first + pattern.low, first + pattern.high + nbytes
        self.aligned = not (first | pattern.bits) & (nbytes - 1)

    def take(self, units: np.ndarray, address: int, size: int, count: int) -> np.ndarray:
        """Return elements of an array of units of size bytes, whose first one lies at an address: count of them for each access."""
        start = (self.low - address) // size
        if self.pattern.dense(size, count):
            return units[start : start + len(self.addresses) * count].reshape(-1, count)
        return units[start:].take(self.pattern.index(size, count))

    def put(self, units: np.ndarray, address: int, size: int, count: int, values: np.ndarray | int) -> None:
        """Assign values, which are broadcast to (accesses, count), as take() reads them. Of accesses to one unit the last one wins."""
        start = (self.low - address) // size
        if self.pattern.dense(size, count):
            units[start : start + len(self.addresses) * count].reshape(-1, count)[...] = values
        else:
            units[start:][self.pattern.index(size, count)] = values


_shared: dict[bytes, SharedPattern] = {}
_global: dict[bytes, GlobalPattern] = {}


def shared_pattern(address: np.ndarray) -> SharedPattern:
    """Return the pattern of uint32 shared addresses (lanes)."""
    key = address.tobytes()
    found = _shared.get(key)
    if found is None:
        if len(_shared) >= MAX_PATTERNS:
            _shared.clear()
        found = _shared[key] = SharedPattern(address)
    return found


def global_pattern(address: np.ndarray) -> GlobalPattern:
    """Return the pattern of uint64 global addresses (lanes)."""
    distances = (address - address[0]).view(np.int64)
    key = distances.tobytes()
    found = _global.get(key)
    if found is None:
        if len(_global) >= MAX_PATTERNS:
            _global.clear()
        found = _global[key] = GlobalPattern(distances)
    return found
