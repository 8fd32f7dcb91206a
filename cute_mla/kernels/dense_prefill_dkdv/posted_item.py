"""Work items on their way from the warp that looks them up to the roles that compute, through shared memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cutlass import Int32, cute

DV_SUM = 2  # `sums` of an item that is dV alone
ITEMS_AHEAD = 2  # a role may be at the rows of an item while the next is posted


@dataclass(frozen=True)
class PostedItem:
    """A work item as the role that looks it up hands it on through shared memory.

    sums, keys, kv_head, first_key: as in KeyItem, but sums is 0 behind the last item. tiles: of the rows of one head. hidden: rows of
    the first tile, from its first on, that key 0 of the item is hidden from.
    """

    sums: Int32
    keys: Int32
    kv_head: Int32
    first_key: Int32
    tiles: Int32
    hidden: Int32

    def post(self, items: cute.Pointer, turn: Int32) -> None:
        """Write the item of a turn. One thread."""
        for number, field in enumerate(fields(PostedItem)):
            (_posted(items, turn) + number).store(getattr(self, field.name))

    @staticmethod
    def of_turn(items: cute.Pointer, turn: Int32) -> PostedItem:
        """Read the item of a turn."""
        return PostedItem(*((_posted(items, turn) + number).load() for number in range(len(fields(PostedItem)))))


def _posted(items: cute.Pointer, turn: Int32) -> cute.Pointer:
    return items + turn % ITEMS_AHEAD * ITEM_WORDS


ITEM_WORDS = len(fields(PostedItem))
