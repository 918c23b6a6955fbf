"""What a namespace *is*: the names that survive a reconnect, unlike ``/dev/nvme0n1``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from uuid import UUID

from fx100_lmcache.nvmf.errors import IdentityError

_SEPARATORS = re.compile(r"[\s:.\-]+")
_HEX_DIGITS = {"nguid": 32, "eui64": 16, "uuid": 32}
UNIQUE_NAMES = ("nguid", "eui64", "uuid")
"""The worldwide unique names, best first. NSIDs repeat in every subsystem."""


@dataclass(frozen=True)
class NamespaceIdentity:
    """The names of one namespace. Zero and empty mean absent, as in NVMe itself.

    Attributes
    ----------
    subsystem_nqn : str or None
        NQN of the subsystem.
    nsid : int or None
        Namespace number inside the subsystem, from 1.
    nguid, uuid : str or None
        32 lower-case hexadecimal digits. Given in any usual spelling (dashes, colons, spaces,
        capitals, ``eui.`` and ``uuid.`` in front). Where a namespace has no UUID the Linux kernel
        shows its NGUID as one; it is kept as shown.
    eui64 : str or None
        16 lower-case hexadecimal digits.

    Raises
    ------
    IdentityError
        If a value is no such identifier.
    """

    subsystem_nqn: str | None = None
    nsid: int | None = None
    nguid: str | None = None
    eui64: str | None = None
    uuid: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "subsystem_nqn", (self.subsystem_nqn or "").strip() or None)
        object.__setattr__(self, "nsid", _nsid(self.nsid))
        for name, digits in _HEX_DIGITS.items():
            object.__setattr__(self, name, _hex(name, getattr(self, name), digits))

    def __str__(self) -> str:
        parts = [f"{name} {_shown(name, value)}" for name, value in self.unique_names()]
        if self.nsid is not None:
            parts.append(f"nsid {self.nsid}")
        if self.subsystem_nqn is not None:
            parts.append(f"of {self.subsystem_nqn}")
        return " ".join(parts) or "no identity"

    def unique_names(self) -> list[tuple[str, str]]:
        """Return the worldwide unique names that are present, best first."""
        pairs = [(name, getattr(self, name)) for name in UNIQUE_NAMES]
        return [(name, value) for name, value in pairs if value is not None]

    def best_name(self) -> str | None:
        """Return the name to write into a configuration, or None if nothing identifies.

        NGUID goes before EUI-64, UUID, and the number inside the subsystem.
        """
        if names := self.unique_names():
            name, value = names[0]
            return f"{name} {_shown(name, value)}"
        if self.subsystem_nqn is not None and self.nsid is not None:
            return f"nsid {self.nsid} of {self.subsystem_nqn}"
        return None

    def disagreement(self, seen: NamespaceIdentity) -> str | None:
        """Compare what is wanted (self) with a namespace that is there.

        Every name that `self` gives must agree, the best one first; what `self` leaves open may
        be anything. A name that the namespace does not report cannot agree.

        Returns
        -------
        str or None
            None if `seen` is the namespace wanted, else the first difference.

        Raises
        ------
        IdentityError
            If `self` does not identify a namespace at all.
        """
        if self.best_name() is None:
            raise IdentityError(
                "an identity needs nguid, eui64 or uuid, or subsystem_nqn together with nsid"
            )
        for name in (*UNIQUE_NAMES, "subsystem_nqn", "nsid"):
            wanted, there = getattr(self, name), getattr(seen, name)
            if wanted is not None and wanted != there:
                shown = "none" if there is None else _shown(name, there)
                return f"{name} is {shown}, not {_shown(name, wanted)}"
        return None

    def likeness(self, seen: NamespaceIdentity) -> int:
        """Count the names that are present in both and equal; orders near misses."""
        mine = ((field.name, getattr(self, field.name)) for field in fields(self))
        return sum(value is not None and value == getattr(seen, name) for name, value in mine)


def _nsid(value: int | str | None) -> int | None:
    if value is None or value == "":
        return None
    try:
        number = int(value)
    except ValueError:
        raise IdentityError(f"nsid {value!r} is not a number") from None
    if not 0 <= number <= 0xFFFF_FFFE:
        raise IdentityError(f"nsid {number} is not between 1 and 4294967294")
    return number or None


def _hex(name: str, value: str | None, digits: int) -> str | None:
    if value is None:
        return None
    normal = value.strip().lower().removeprefix("eui.").removeprefix("uuid.").removeprefix("0x")
    normal = _SEPARATORS.sub("", normal)
    if not normal.strip("0"):
        return None
    if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", normal):
        raise IdentityError(f"{name} {value!r} must be {digits} hexadecimal digits")
    return normal


def _shown(name: str, value: object) -> str:
    return str(UUID(str(value))) if name == "uuid" else str(value)
