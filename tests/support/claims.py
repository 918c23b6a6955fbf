"""What the tests of claims share."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from fx100_lmcache.members.base import Member
from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.ondisk.geometry import Geometry, MemberShape
from fx100_lmcache.testing.memory import MemoryMember
from fx100_lmcache.volume.claim import ClaimTiming, newest_claim, read_claims
from fx100_lmcache.volume.claiming import Claimer, Taken
from fx100_lmcache.volume.machine import Machine

VOLUME = uuid.UUID(int=5).bytes
GEOMETRY = Geometry(4096, 4, 512, 512, 2, (MemberShape(1 << 20, 6, 10),) * 2)
CLAIM = ClaimBlock(
    0, generation=3, epoch=1000, counter=4, holder="host=elsewhere machine=x boot=y pid=7"
)
TIMING = ClaimTiming()


@dataclass
class Time:
    """A clock that moves when somebody sleeps, and what else happens meanwhile."""

    now_s: float = 0.0
    meanwhile: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for due in [each for each in self.meanwhile if each[0] <= self.now_s]:
            self.meanwhile.remove(due)
            due[1]()


def machine(time: Time | None = None, boot_id: str = "here") -> Machine:
    clock = time or Time()
    return Machine(boot_id, "us", "m", clock, clock.sleep)


def two() -> list[MemoryMember]:
    return [MemoryMember(1 << 20, index=n) for n in range(2)]


def take(
    members: list[MemoryMember],
    unix_s: float = 2000.0,
    *,
    us: Machine | None = None,
    take_over: bool = False,
    shards: tuple[int, ...] = (0,),
    timing: ClaimTiming = TIMING,
) -> Taken:
    where: list[Member] = list(members)
    claimer = Claimer(where, GEOMETRY, VOLUME, us or machine(), timing, take_over)
    return claimer.take(shards, unix_s)


def on_media(members: list[MemoryMember], shard: int = 0) -> ClaimBlock | None:
    return newest_claim(read_claims(members, GEOMETRY, shard), VOLUME, shard)
