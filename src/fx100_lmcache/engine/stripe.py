"""The members of a stripe with their lanes: those in force, those replaced, and probes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fx100_lmcache.engine.jobs import MemberState
from fx100_lmcache.engine.member_slot import MemberSlot
from fx100_lmcache.members.base import Member

log = logging.getLogger(__name__)

RETIRED_S = 2.0  # a replaced member is kept open at least so long
MAX_STUCK = 64  # transfers of one member that may be left in the kernel, over all its returns

Probe = Callable[[int, Member], "Member | None"]


class Stripe:
    """Members by their place. Thread-safe.

    Parameters
    ----------
    equip : callable
        Makes a slot with lanes: all of it or, if it raises, nothing.
    now : callable
        The engine's clock, in seconds.

    Attributes
    ----------
    slots : list of MemberSlot
        Those in force.
    """

    def __init__(
        self, equip: Callable[[int, Member], MemberSlot], now: Callable[[], float]
    ) -> None:
        self.slots: list[MemberSlot] = []
        self._equip = equip
        self._now = now
        self._retired: list[MemberSlot] = []
        self._closed = False
        self._lock = threading.Lock()

    def probe(self, index: int, look: Probe) -> None:
        """Look whether a member that is not up works again, perhaps under another name.

        Also whether one whose write found no space is there at all. One that does not come into
        use, for want of threads or memory too, is looked at again with the next call.
        """
        self._let_go_of_retired()
        slot = self.slots[index]
        if slot.health.usable and not slot.health.doubted:
            return
        before = slot.health.state
        found = look(index, slot.member)
        if found is None:
            slot.health.note_probe(works=False)
            if before == "up":
                log.error(
                    "%s: gone: a write found no space, nor a read the label", slot.member.name
                )
            return
        same = found is slot.member
        if same and not slot.health.stuck:
            slot.health.note_probe(works=True)
        elif not self._replace(slot, found):
            if not same:
                found.close()
            return
        if same and before != "up":
            log.warning("%s: up again (was %s)", found.name, before)
        elif not same:
            log.warning("%s: back as %s", slot.member.name, found.name)

    def _replace(self, slot: MemberSlot, found: Member) -> bool:
        """Put a member to use with lanes of its own: what is stuck keeps threads and budget.

        Returns
        -------
        bool
            False, with nothing done, while there are no threads or memory, or too much is stuck.
        """
        if self.stuck_at(slot.index) > MAX_STUCK:
            log.error("%s: %d transfers are stuck; not replaced", found.name, MAX_STUCK)
            return False
        try:
            fresh = self._equip(slot.index, found)
        except (RuntimeError, OSError, MemoryError) as problem:
            log.error("%s: works, but cannot be used yet: %s", found.name, problem)
            return False
        fresh.succeed(slot)
        with self._lock:
            if not self._closed:
                slot.retired_at = self._now()
                self._retired.append(slot)
                self.slots[slot.index] = fresh
                return True
        fresh.close()
        return False

    def _let_go_of_retired(self) -> None:
        """Send threads home that have nothing left to do, and close members that are not used.

        Not before whoever was just submitting is done, and the kernel has let go: a descriptor
        must not be reused under a transfer.
        """
        until = self._now() - RETIRED_S
        with self._lock:
            for slot in [slot for slot in self._retired if slot.retired_at <= until]:
                if slot.only_stuck:
                    slot.close()
                if slot.idle:
                    self._forget(slot)

    def _forget(self, slot: MemberSlot) -> None:
        self._retired.remove(slot)
        if all(other.member is not slot.member for other in (*self.slots, *self._retired)):
            slot.member.close()

    def stuck_at(self, index: int) -> int:
        """Count the transfers that the kernel keeps past their deadline, at one place."""
        slots = [self.slots[index], *self._retired]
        return sum(slot.health.stuck for slot in slots if slot.index == index)

    def stuck(self) -> int:
        """Count the transfers that the kernel keeps past their deadline."""
        return sum(self.stuck_at(slot.index) for slot in self.slots)

    def down_mask(self) -> int:
        """Bit map of the members that are not up."""
        return sum(1 << slot.index for slot in self.slots if not slot.health.usable)

    def states(self) -> list[MemberState]:
        """Report every member's health."""
        return [
            MemberState(
                s.member.name,
                s.health.state,
                s.member.io_mode,
                s.max_io_bytes,
                self.stuck_at(s.index),
                s.health.errors,
                s.health.last_error,
            )
            for s in self.slots
        ]

    def close(self) -> None:
        """Send all threads home: what none has started by now, none will start.

        No probe puts lanes into force from here on.
        """
        with self._lock:
            self._closed = True
            slots = [*self.slots, *self._retired]
        for slot in slots:
            slot.close()

    def close_retired(self) -> None:
        """Close the replaced members that the kernel has nothing of, after :meth:`close`."""
        with self._lock:
            for slot in [slot for slot in self._retired if not slot.health.stuck]:
                self._forget(slot)
