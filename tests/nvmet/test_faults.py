"""What a real kernel does to a reader when a path or a namespace goes; fakes must keep to it."""

import asyncio
import errno
import os
import time
from typing import Any

import pytest

from fx100_lmcache.nvmf.connect import connect_subsystem, disconnect_subsystem
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.plan import HostIdentity
from fx100_lmcache.nvmf.resolve import resolve
from fx100_lmcache.nvmf.runner import NvmeCli
from fx100_lmcache.nvmf.sysfs import Sysfs
from support.nvmet_host import BLOCK_BYTES, Reading, opened, read_block, wanted
from support.nvmet_target import Target

CONTENT = b"x" * BLOCK_BYTES


@pytest.fixture
def served(target: Target, cli: NvmeCli, sysfs: Sysfs, host: HostIdentity) -> Any:
    """Return subsystem, port and device of one connected namespace; fast_io_fail_tmo is 2 s."""
    subsystem, port = target.subsystem(), target.tcp_port()
    subsystem.add_namespace(1, content=CONTENT)
    port.offer(subsystem)
    asyncio.run(connect_subsystem(wanted(subsystem, port), host, cli, sysfs))
    found = asyncio.run(resolve(NamespaceIdentity(subsystem.nqn, 1), sysfs, timeout_s=10))
    return subsystem, port, found.device


def wait_for_state(sysfs: Sysfs, nqn: str, state: str) -> None:
    for _ in range(200):
        [controller] = asyncio.run(sysfs.snapshot()).controllers(nqn)
        if controller.state == state:
            return
        time.sleep(0.1)
    pytest.fail(f"the controller is {controller.state}, not {state}, after 20 s")


def test_lost_path_fails_fast_and_the_same_descriptor_comes_back(served: Any, sysfs: Sysfs) -> None:
    subsystem, port, device = served
    with opened(device) as descriptor:
        assert read_block(descriptor) == CONTENT
        port.take_away()
        wait_for_state(sysfs, subsystem.nqn, "connecting")

        # ctrl_loss_tmo is 600 s: only fast_io_fail_tmo can end this read in time.
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            Reading(descriptor).result()

        port.give_back()
        wait_for_state(sysfs, subsystem.nqn, "live")
        assert Reading(descriptor).result() == CONTENT


def test_disabled_namespace_reads_no_bytes_and_comes_back_elsewhere(
    served: Any, sysfs: Sysfs
) -> None:
    subsystem, _, device = served
    identity = NamespaceIdentity(subsystem.nqn, 1)
    with opened(device) as descriptor:
        subsystem.namespaces[1].disable()
        assert gone(sysfs, identity)

        # Kernel 6.1 gives 0 bytes; newer ones may say EIO first. Never data.
        assert outcome_of(Reading(descriptor)) in (b"", errno.EIO, errno.ENODEV)

        subsystem.namespaces[1].enable()
        found = asyncio.run(resolve(identity, sysfs, timeout_s=10))
        assert found.device != device
        with opened(found.device) as fresh:
            assert read_block(fresh) == CONTENT
        assert outcome_of(Reading(descriptor)) in (b"", errno.EIO, errno.ENODEV)


def outcome_of(reading: Reading) -> bytes | int | None:
    """Return the bytes read, or the error's number."""
    try:
        return reading.result()
    except OSError as error:
        return error.errno


def gone(sysfs: Sysfs, identity: NamespaceIdentity) -> bool:
    for _ in range(100):
        snapshot = asyncio.run(sysfs.snapshot())
        if all(identity.disagreement(each.identity) for each in snapshot.namespaces()):
            return True
        time.sleep(0.1)
    return False


def test_descriptor_left_open_over_a_disconnect_reads_no_bytes(
    served: Any, cli: NvmeCli, sysfs: Sysfs
) -> None:
    subsystem, _, device = served
    with opened(device, os.O_RDWR) as descriptor:
        asyncio.run(disconnect_subsystem(subsystem.nqn, cli, sysfs))

        assert Reading(descriptor).result() == b""


def test_dropped_packets_block_a_read_until_they_flow_again(served: Any) -> None:
    _, port, device = served
    with opened(device) as descriptor:
        port.drop_packets()
        reading = Reading(descriptor)
        assert not reading.ended_within(2)
        port.stop_dropping()

        assert reading.result() == CONTENT


def test_delayed_packets_delay_a_read(served: Any) -> None:
    _, port, device = served
    with opened(device) as descriptor:
        port.delay_packets(20)
        start = time.monotonic()
        assert Reading(descriptor).result() == CONTENT
        slow_s = time.monotonic() - start
        port.stop_delaying()

        assert slow_s >= 0.040  # request and answer each wait 20 ms: a lower bound, not a speed
