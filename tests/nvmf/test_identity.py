from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fx100_lmcache.config import NvmeNamespace
from fx100_lmcache.nvmf.errors import IdentityError
from fx100_lmcache.nvmf.namespace_id import NamespaceIdentity

NGUID = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32
NQN = "nqn.2024-01.io.fx100:array"


@given(
    value=st.integers(1, (1 << 128) - 1),
    group=st.sampled_from([2, 4, 8, 32]),
    separator=st.sampled_from(["", "-", ":", " ", "."]),
    prefix=st.sampled_from(["", "eui.", "uuid.", "0x"]),
    upper=st.booleans(),
)
def test_every_spelling_is_one_identity(
    value: Any, group: Any, separator: Any, prefix: Any, upper: Any
) -> None:
    digits = f"{value:032x}"
    spelled = separator.join(digits[at : at + group] for at in range(0, 32, group))
    spelled = prefix + (spelled.upper() if upper else spelled)

    assert NamespaceIdentity(nguid=spelled).nguid == digits
    assert NamespaceIdentity(uuid=spelled).uuid == digits


@pytest.mark.parametrize("nothing", [None, "", " ", "0", "0" * 32, "00-00-00-00"])
def test_zero_and_empty_mean_absent(nothing: str | None) -> None:
    identity = NamespaceIdentity(nguid=nothing, eui64=nothing, uuid=nothing, nsid=0)

    assert identity == NamespaceIdentity()
    assert identity.best_name() is None
    assert str(identity) == "no identity"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nguid", "abc"),
        ("nguid", NGUID + "0"),
        ("eui64", NGUID),
        ("uuid", "not-a-uuid"),
        ("nsid", -1),
        ("nsid", 0xFFFF_FFFF),
        ("nsid", "one"),
    ],
)
def test_what_is_no_identifier_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(IdentityError, match=field):
        NamespaceIdentity(**{field: value})


def test_best_name_goes_by_uniqueness() -> None:
    every = {"nguid": NGUID, "eui64": "0011223344556677", "uuid": OTHER}
    full = NamespaceIdentity(NQN, 2, **every)

    assert full.best_name() == f"nguid {NGUID}"
    assert NamespaceIdentity(NQN, 2, None, "0011223344556677", OTHER).best_name() == (
        "eui64 0011223344556677"
    )
    assert NamespaceIdentity(NQN, 2, uuid=OTHER).best_name() == (
        "uuid ffffffff-ffff-ffff-ffff-ffffffffffff"
    )
    assert NamespaceIdentity(NQN, 2).best_name() == f"nsid 2 of {NQN}"
    assert NamespaceIdentity(NQN).best_name() is None
    assert NamespaceIdentity(nsid=2).best_name() is None
    assert str(full).endswith(f"nsid 2 of {NQN}")


SEEN = NamespaceIdentity(NQN, 2, NGUID, None, OTHER)


@pytest.mark.parametrize(
    ("wanted", "difference"),
    [
        (NamespaceIdentity(nguid=NGUID), None),
        (NamespaceIdentity(uuid=OTHER), None),
        (NamespaceIdentity(NQN, 2), None),
        (NamespaceIdentity(NQN, 2, NGUID, None, OTHER), None),
        (NamespaceIdentity(nguid=OTHER), f"nguid is {NGUID}, not {OTHER}"),
        (NamespaceIdentity(NQN, 3), "nsid is 2, not 3"),
        (NamespaceIdentity("nqn.2024-01.io.fx100:b", 2), f"subsystem_nqn is {NQN}, not "),
        (NamespaceIdentity(NQN, 2, OTHER), "nguid is "),
        (NamespaceIdentity(nguid=NGUID, nsid=3), "nsid is 2, not 3"),
        (NamespaceIdentity(nguid=NGUID, uuid=NGUID), "uuid is ffffffff-"),
        (NamespaceIdentity(eui64="0011223344556677"), "eui64 is none, not 0011223344556677"),
    ],
)
def test_every_name_that_is_given_must_agree(wanted: Any, difference: str | None) -> None:
    found = wanted.disagreement(SEEN)

    assert found is None if difference is None else found.startswith(difference)


@pytest.mark.parametrize("wanted", [NamespaceIdentity(), NamespaceIdentity(NQN)])
def test_comparing_without_an_identity_is_an_error(wanted: Any) -> None:
    with pytest.raises(IdentityError, match="needs nguid"):
        wanted.disagreement(SEEN)


def test_configured_namespace_becomes_an_identity() -> None:
    configured = NvmeNamespace(nguid=NGUID, subsystem_nqn=NQN, nsid=2)

    identity = NamespaceIdentity(**configured.model_dump())

    assert identity.disagreement(SEEN) is None
