"""A Linux nvmet target made through configfs: subsystems, namespaces, ports, and their faults.

Everything a `Target` makes carries its name, and `close` removes all of it and nothing else, so
that the tests may run on a developer's own kernel.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGFS = Path("/sys/kernel/config/nvmet")
BACKING = Path("/dev/shm")  # the guest's other files are the host's
ADDRESS = "127.0.0.1"
FIRST_SERVICE = 44420


def sh(*argv: str) -> str:
    """Run a tool and return what it printed; a failure shows what it said."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


@dataclass
class TargetNamespace:
    """One namespace on a loop device over a file in memory, or on the file itself."""

    directory: Path
    nsid: int
    file: Path
    loop: str
    uuid: str = ""

    def enable(self) -> None:
        (self.directory / "enable").write_text("1")

    def disable(self) -> None:
        (self.directory / "enable").write_text("0")

    def remove(self) -> None:
        self.disable()
        self.directory.rmdir()
        if self.loop:
            sh("losetup", "-d", self.loop)
        self.file.unlink()


@dataclass
class TargetSubsystem:
    """One subsystem that any host may use, until `allow_only` says otherwise."""

    nqn: str
    directory: Path
    namespaces: dict[int, TargetNamespace] = field(default_factory=dict)
    hosts: list[Path] = field(default_factory=list)

    def add_namespace(
        self,
        nsid: int,
        size_bytes: int = 8 << 20,
        lba_bytes: int = 512,
        nguid: str | None = None,
        content: bytes = b"",
    ) -> TargetNamespace:
        """Make a namespace, write `content` at its start and enable it."""
        file = BACKING / f"{self.nqn.rpartition(':')[2]}.{nsid}"
        with file.open("wb") as backing:
            backing.write(content)
            backing.truncate(size_bytes)
        loop = sh("losetup", "--find", "--show", "--sector-size", str(lba_bytes), str(file))
        directory = self.directory / "namespaces" / str(nsid)
        directory.mkdir()
        (directory / "device_path").write_text(loop)
        if nguid is not None:
            (directory / "device_nguid").write_text(nguid)
        return self._enabled(directory, nsid, file, loop)

    def add_thin_namespace(self, nsid: int, size_bytes: int, folder: Path) -> TargetNamespace:
        """Make a namespace on a sparse file: what its file system has no room for is refused.

        The host hears "capacity exceeded"; a loop device in between would make an I/O error of it.
        """
        file = folder / f"{self.nqn.rpartition(':')[2]}.{nsid}"
        with file.open("wb") as backing:
            backing.truncate(size_bytes)
        directory = self.directory / "namespaces" / str(nsid)
        directory.mkdir()
        (directory / "device_path").write_text(str(file))
        (directory / "buffered_io").write_text("1")  # a tmpfs of Linux 6.1 has no direct I/O
        return self._enabled(directory, nsid, file, "")

    def _enabled(self, directory: Path, nsid: int, file: Path, loop: str) -> TargetNamespace:
        uuid = (directory / "device_uuid").read_text().strip()
        namespace = TargetNamespace(directory, nsid, file, loop, uuid)
        namespace.enable()
        self.namespaces[nsid] = namespace
        return namespace

    def allow_only(self, host_nqn: str, dhchap_key: str | None = None) -> None:
        """Refuse all hosts but this one; with a key, it must authenticate itself."""
        host = CONFIGFS / "hosts" / host_nqn
        host.mkdir()
        if dhchap_key is not None:
            (host / "dhchap_key").write_text(dhchap_key)
        (self.directory / "attr_allow_any_host").write_text("0")
        (self.directory / "allowed_hosts" / host_nqn).symlink_to(host)
        self.hosts.append(host)

    def remove(self) -> None:
        for namespace in self.namespaces.values():
            namespace.remove()
        for host in self.hosts:
            (self.directory / "allowed_hosts" / host.name).unlink()
            host.rmdir()
        self.directory.rmdir()


@dataclass
class TargetPort:
    """One port over which subsystems are offered."""

    transport: str
    service: int
    directory: Path
    offered: list[TargetSubsystem] = field(default_factory=list)
    rules: list[list[str]] = field(default_factory=list)  # commands that take the rules back
    slow: bool = False

    def offer(self, *subsystems: TargetSubsystem) -> None:
        for subsystem in subsystems:
            self._link(subsystem).symlink_to(subsystem.directory)
            self.offered.append(subsystem)

    def take_away(self) -> None:
        """Stop serving: connections end, new ones are refused."""
        for subsystem in self.offered:
            self._link(subsystem).unlink(missing_ok=True)

    def give_back(self) -> None:
        for subsystem in self.offered:
            self._link(subsystem).symlink_to(subsystem.directory)

    def set_ana_state(self, state: str) -> None:
        """Set the state of ANA group 1, to which all namespaces belong."""
        (self.directory / "ana_groups" / "1" / "ana_state").write_text(state)

    def drop_packets(self) -> None:
        """Drop everything from and to this port, as a dead switch does; nobody is told."""
        tool = _iptables()
        for end in ("--dport", "--sport"):
            rule = ["INPUT", "-p", "tcp", end, str(self.service), "-j", "DROP"]
            sh(tool, "-w", "-I", *rule)
            self.rules.append([tool, "-w", "-D", *rule])

    def stop_dropping(self) -> None:
        while self.rules:
            sh(*self.rules.pop())

    def delay_packets(self, delay_ms: int, loss_percent: int = 0) -> None:
        """Delay (and lose) this port's packets in each direction, and no others of the machine."""
        sh("tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "prio", "bands", "4")
        self.slow = True
        delay: tuple[str, ...] = ("netem", "delay", f"{delay_ms}ms", "limit", "100000")
        delay += ("loss", f"{loss_percent}%") if loss_percent else ()
        sh("tc", "qdisc", "add", "dev", "lo", "parent", "1:4", "handle", "40:", *delay)
        for end in ("dport", "sport"):
            match = ("match", "ip", end, str(self.service), "0xffff", "flowid", "1:4")
            sh("tc", "filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip", "u32", *match)

    def stop_delaying(self) -> None:
        if self.slow:
            sh("tc", "qdisc", "del", "dev", "lo", "root")
            self.slow = False

    def remove(self) -> None:
        self.stop_dropping()
        self.stop_delaying()
        self.take_away()
        self.directory.rmdir()

    def _link(self, subsystem: TargetSubsystem) -> Path:
        return self.directory / "subsystems" / subsystem.nqn


class Target:
    """All that one test makes.

    Parameters
    ----------
    name : str
        Part of every NQN, so that tests cannot meet.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.subsystems: list[TargetSubsystem] = []
        self.ports: list[TargetPort] = []

    def subsystem(self, suffix: str = "a") -> TargetSubsystem:
        nqn = f"nqn.2024-01.io.fx100:{self.name}-{suffix}"
        directory = CONFIGFS / "subsystems" / nqn
        directory.mkdir()
        (directory / "attr_allow_any_host").write_text("1")
        self.subsystems.append(TargetSubsystem(nqn, directory))
        return self.subsystems[-1]

    def tcp_port(self) -> TargetPort:
        port = self._port("tcp")
        for name, value in (("adrfam", "ipv4"), ("traddr", ADDRESS), ("trsvcid", port.service)):
            (port.directory / f"addr_{name}").write_text(str(value))
        return port

    def loop_port(self) -> TargetPort:
        return self._port("loop")

    def close(self) -> None:
        """Remove everything, connections first; goes on after a failure and reports the first."""
        failures: list[Exception] = []
        for subsystem in self.subsystems:
            self._attempt(failures, sh, "nvme", "disconnect", "-n", subsystem.nqn)
        for port in self.ports:
            self._attempt(failures, port.remove)
        for subsystem in self.subsystems:
            self._attempt(failures, subsystem.remove)
        self.ports.clear()
        self.subsystems.clear()
        if failures:
            raise failures[0]

    @staticmethod
    def _attempt(failures: Any, action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            failures.append(error)

    def _port(self, transport: str) -> TargetPort:
        used = {int(each.name) for each in (CONFIGFS / "ports").iterdir()}
        number = next(each for each in range(1, 1 << 15) if each not in used)
        directory = CONFIGFS / "ports" / str(number)
        directory.mkdir()
        (directory / "addr_trtype").write_text(transport)
        self.ports.append(TargetPort(transport, FIRST_SERVICE + number, directory))
        return self.ports[-1]


def _iptables() -> str:
    """Name the iptables that this kernel supports: nf_tables is an option of its own."""
    chain = "fx100-probe"
    probe = subprocess.run(
        ("iptables", "-w", "-N", chain), capture_output=True, check=False, timeout=60
    )
    if probe.returncode:
        return "iptables-legacy"
    sh("iptables", "-w", "-X", chain)
    return "iptables"
