from typing import Any

import pytest

from fx100_lmcache.config import NvmeAddress, NvmeSubsystem
from fx100_lmcache.findings import Severity, worst
from fx100_lmcache.nvmf.check import check
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity
from fx100_lmcache.nvmf.snapshot import (
    NEVER,
    NamespacePath,
    Snapshot,
)
from support.nvmf_parts import NQN, controller, namespace, snapshot


def bad(findings: Any) -> Any:
    return [each for each in findings if each.severity in (Severity.WARNING, Severity.PROBLEM)]


def test_all_well_says_so_for_every_part() -> None:
    findings = check(snapshot(), cpus=8)

    assert worst(findings) is Severity.OK
    subjects = {finding.subject.split()[0] for finding in findings}
    assert subjects == {"nvme-subsys0", "nvme1", "nvme2", "/dev/nvme0n1"}
    assert any("fails after 2 s" in finding.what for finding in findings)


def test_nothing_there_is_nothing_to_say() -> None:
    assert check(Snapshot()) == []
    assert worst([]) is Severity.OK


def test_local_drives_are_left_out() -> None:
    assert check(snapshot(controller(1, transport="pcie"))) == []


@pytest.mark.parametrize(
    ("change", "severity", "what", "do"),
    [
        ({"fast_io_fail_s": NEVER}, "problem", "waits until the controller is dropped (600 s)",
         "echo 5 > /sys/class/nvme/nvme1/fast_io_fail_tmo"),
        ({"fast_io_fail_s": NEVER, "ctrl_loss_timeout_s": NEVER}, "problem", "waits for ever",
         "echo 5 > /sys/class/nvme/nvme1/fast_io_fail_tmo"),
        ({"fast_io_fail_s": 6}, "problem", "waits 6 s, more than 5 s", "echo 5 > "),
        ({"fast_io_fail_s": None}, "problem", "not bounded", "kernel 5.11"),
        ({"state": "connecting"}, "problem", "connecting", "dmesg"),
        ({"ctrl_loss_timeout_s": 6}, "warning", "dropped after 6 s",
         "echo 600 > /sys/class/nvme/nvme1/ctrl_loss_tmo"),
        ({"keep_alive_s": 0}, "warning", "no keep-alive", "keep_alive: 5s"),
        ({"keep_alive_s": 120}, "warning", "keep-alive time-out 120 s", "keep_alive: 5s"),
        ({"io_queues": 1}, "warning", "1 I/O queues, 4 would be right", "nr_io_queues"),
    ],
)  # fmt: skip
def test_controller(change: dict[str, Any], severity: str, what: str, do: str) -> None:
    [finding] = bad(check(snapshot(controller(1, **change), controller(2)), cpus=8))

    assert finding.severity == severity
    assert finding.subject.startswith("nvme1 (tcp 10.0.0.1:4420)")
    assert what in finding.what
    assert finding.why
    assert do in finding.do
    assert str(finding).startswith(f"{severity}: nvme1 ")


def test_waiting_for_ever_is_fine_where_io_fails_fast() -> None:
    assert bad(check(snapshot(controller(1, ctrl_loss_timeout_s=NEVER), controller(2)))) == []


def test_slow_reconnect_is_noted() -> None:
    findings = check(snapshot(controller(1, reconnect_delay_s=30), controller(2)))

    assert [each.severity for each in findings if "30 s between" in each.what] == [Severity.NOTE]


@pytest.mark.parametrize(
    ("have", "asked", "cpus", "enough"),
    [
        (1, None, 1, True),  # a second queue is of no use to one CPU
        (2, None, 2, True),
        (2, None, 8, False),
        (4, None, 64, True),
        (4, 16, 64, False),
        (16, 16, 64, True),
        (8, 16, 8, True),
        (None, 16, 64, True),
    ],
)
def test_number_of_queues(have: int | None, asked: int | None, cpus: int, enough: bool) -> None:
    wanted = [subsystem(nr_io_queues=asked)]
    found = bad(check(snapshot(controller(1, io_queues=have), controller(2, io_queues=64)), wanted,
                      cpus))  # fmt: skip

    assert (found == []) is enough


def subsystem(**changes: Any) -> NvmeSubsystem:
    addresses = (NvmeAddress(traddr="10.0.0.1"), NvmeAddress(traddr="10.0.0.2"))
    return NvmeSubsystem(subsystem_nqn=NQN, addresses=addresses, **changes)


def test_numa_policy_leaves_paths_idle() -> None:
    [finding] = bad(check(snapshot(iopolicy="numa")))

    assert "2 paths live, I/O policy numa" in finding.what
    assert "echo round-robin > /sys/class/nvme-subsystem/nvme-subsys0/iopolicy" in finding.do


def test_one_path_is_noted() -> None:
    findings = check(snapshot(controller(1), iopolicy="numa"))

    assert bad(findings) == []
    assert any(each.what == "one path" for each in findings)


def test_no_live_path_is_a_problem() -> None:
    down = [controller(number, state="connecting") for number in (1, 2)]

    assert any("none of 2 paths is live" in each.what for each in bad(check(snapshot(*down))))


def test_path_that_is_configured_and_missing() -> None:
    [finding] = bad(check(snapshot(controller(1)), [subsystem()]))

    assert finding.severity is Severity.PROBLEM
    assert finding.what == "not connected over tcp to 10.0.0.2:4420"
    assert finding.do == "fx100 nvme connect"


def test_fewer_commands_than_wanted_is_noted() -> None:
    findings = check(snapshot(controller(1, queue_size=32), controller(2)), [subsystem()])

    assert any("32 commands per queue, 128 wanted" in each.what for each in findings)


@pytest.mark.parametrize(
    ("change", "severity", "what", "do"),
    [
        ({"lba_bytes": 520}, "problem", "logical blocks of 520 B", "format or enable"),
        ({"size_bytes": 0}, "problem", "0 B in all", "format or enable"),
        ({"identity": NamespaceIdentity(NQN, 1)}, "warning", "no NGUID", "on the array"),
        (
            {"max_sectors_kb": 512},
            "warning",
            "transfers up to 512 KiB",
            "echo 1024 | tee /sys/block/nvme0n1/queue/max_sectors_kb "
            "/sys/class/nvme/nvme1/nvme0c1n1/queue/max_sectors_kb "
            "/sys/class/nvme/nvme2/nvme0c2n1/queue/max_sectors_kb",
        ),
        (
            {"paths": (NamespacePath("nvme0c1n1", "nvme1", "inaccessible", "none"),)},
            "problem",
            "no usable path: inaccessible",
            "which of its controllers",
        ),
        (
            {"paths": (NamespacePath("nvme0c1n1", "nvme1", "non-optimized", "none"),)},
            "warning",
            "only non-optimized",
            "owning controller",
        ),
        (
            {"paths": (NamespacePath("nvme0c1n1", "nvme1", None, "mq-deadline"),)},
            "warning",
            "scheduler mq-deadline on path nvme0c1n1",
            "echo none > /sys/class/nvme/nvme1/nvme0c1n1/queue/scheduler",
        ),
    ],
)
def test_namespace(change: dict[str, Any], severity: str, what: str, do: str) -> None:
    [finding] = bad(check(snapshot(namespace(**change))))

    assert finding.severity == severity
    assert finding.subject == "/dev/nvme0n1 (nsid 1)"
    assert what in finding.what
    assert finding.why
    assert do in finding.do


def test_a_target_that_states_no_limit_is_noted() -> None:
    """nvmet over tcp: max_hw_sectors_kb is 2147483644, and still large requests may fail."""
    findings = check(snapshot(namespace(max_hw_sectors_kb=2147483644, max_sectors_kb=1280)))

    [finding] = [each for each in findings if "no limit" in each.what]
    assert finding.severity is Severity.NOTE
    assert "max_io" in finding.why


def test_a_device_with_a_small_limit_of_its_own_is_accepted() -> None:
    assert bad(check(snapshot(namespace(max_hw_sectors_kb=512, max_sectors_kb=512)))) == []


def test_unknown_limit_is_noted() -> None:
    findings = check(snapshot(namespace(max_hw_sectors_kb=None)))

    assert any(each.what == "transfer limit unknown" for each in findings)
