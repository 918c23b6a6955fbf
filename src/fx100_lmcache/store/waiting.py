"""Puts on their way, and the room where they wait: a line for space, and seats by object. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fx100_lmcache.space.space import Extent
from fx100_lmcache.store.types import PutItem, PutResult


@dataclass(slots=True, eq=False)
class Put:
    """One object on its way to the media.

    Attributes
    ----------
    blocks : int
        That it takes.
    started, deadline : float
        On the engine's clock.
    answers : list of callable
        Who hears of its fate: whoever put it, then those who put the same meanwhile.
    generation : dict of int to int
        The shards' generations when it got its space: a clear since then undoes it.
    extent : Extent or None
        Its space.
    inode_begun : bool
        Whether its inode may be on the media.
    stuck : int
        Its writes that the kernel still has after the deadline.
    attempts : int
        Ways tried so far to find it space in few enough pieces.
    erases_ahead : int or None
        It looks for space again when so many erases have ended; None while it is not the first.
    """

    item: PutItem
    blocks: int
    started: float
    deadline: float
    answers: list[Callable[[PutResult], None]]
    generation: dict[int, int] = field(default_factory=dict)
    extent: Extent | None = None
    inode_begun: bool = False
    stuck: int = 0
    attempts: int = 0
    erases_ahead: int | None = None


class WaitingRoom:
    """Puts that wait, each until its deadline at most. Not thread-safe.

    Those that wait for space stand in line: the first one is served first, so that a large object
    is not overtaken for ever by small ones. Those that wait for an older copy of their object to
    be erased need no line, since an object is put once at a time.

    Attributes
    ----------
    blocks : int
        What those in the line need together.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._line: OrderedDict[bytes, Put] = OrderedDict()  # a dict's first element is slow
        self._seats: dict[bytes, Put] = {}
        self._due: list[tuple[float, int, bytes]] = []
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._line)

    @property
    def puts(self) -> int:
        """How many wait, for whatever."""
        return len(self._line) + len(self._seats)

    @property
    def first(self) -> Put | None:
        """Whose turn it is."""
        return next(iter(self._line.values()), None)

    def queue(self, put: Put) -> None:
        """Have a put wait for space, behind the others."""
        self._line[put.item.digest] = put
        self.blocks += put.blocks
        self._note_deadline(put)

    def seat(self, put: Put) -> None:
        """Have a put wait for an older copy of its object to be erased."""
        self._seats[put.item.digest] = put
        self._note_deadline(put)

    def seated(self, digest: bytes) -> Put | None:
        """Return the put that waits for an older copy of this object to be erased."""
        return self._seats.get(digest)

    def leave(self, put: Put) -> bool:
        """Take a put out; False if it does not wait."""
        digest = put.item.digest
        if self._line.get(digest) is put:
            del self._line[digest]
            self.blocks -= put.blocks
            return True
        if self._seats.get(digest) is put:
            del self._seats[digest]
            return True
        return False

    def all(self) -> Iterator[Put]:
        """Return those who wait, in any order."""
        return iter([*self._line.values(), *self._seats.values()])

    def next_deadline(self) -> float | None:
        """When the next one has waited long enough, or None."""
        while self._due and self._waiting(self._due[0]) is None:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def overdue(self, now_s: float) -> Put | None:
        """Return one that has waited long enough; whether it stands or sits."""
        due = self.next_deadline()
        return self._waiting(self._due[0]) if due is not None and due <= now_s else None

    def _waiting(self, due: tuple[float, int, bytes]) -> Put | None:
        deadline, _, digest = due
        put = self._line.get(digest) or self._seats.get(digest)
        return put if put is not None and put.deadline == deadline else None

    def _note_deadline(self, put: Put) -> None:
        if len(self._due) > 2 * self.puts + 64:  # most of them have left
            self._due = [due for due in self._due if self._waiting(due) is not None]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (put.deadline, next(self._sequence), put.item.digest))
