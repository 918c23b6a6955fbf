"""The claims of a store's volume, as somebody else on the same media sees and writes them."""

from dataclasses import replace

from fx100_lmcache.ondisk.claim_block import ClaimBlock
from fx100_lmcache.testing.harness import Rig
from fx100_lmcache.volume.claim import newest_claim, read_claims, valid_claims, write_claim

FAR = "host=far machine=m boot=b pid=1 nonce=ffff"


def on_media(store: Rig) -> ClaimBlock:
    volume = store.store.volume
    found = newest_claim(read_claims(store.members, volume.geometry, 0), volume.uuid, 0)
    assert found is not None
    return found


def all_blocks(store: Rig) -> list[ClaimBlock]:
    volume = store.store.volume
    return valid_claims(read_claims(store.members, volume.geometry, 0), volume.uuid, 0)


def write_on_all(store: Rig, block: ClaimBlock) -> None:
    volume = store.store.volume
    for member in store.members:
        write_claim(member, volume.geometry, volume.uuid, block)


def taken_over(store: Rig, epoch: int = 2_000_000_000, holder: str = FAR) -> None:
    """Somebody else was given the shard while we were stopped."""
    theirs = replace(on_media(store), epoch=epoch, holder=holder)
    write_on_all(store, replace(theirs, counter=theirs.counter + 1))
    write_on_all(store, replace(theirs, counter=theirs.counter + 2))
