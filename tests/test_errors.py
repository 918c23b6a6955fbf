"""Errors say what happened and, apart from that, what to do about it."""

import pickle

import pytest

from fx100_lmcache.errors import FX100Error, VolumeError
from fx100_lmcache.nvmf.causes import explain
from fx100_lmcache.nvmf.errors import (
    AmbiguousNamespaceError,
    NamespaceNotFoundError,
    SettingError,
)

WITH_REMEDY = [
    VolumeError("it broke", remedy="mend it"),
    SettingError("cannot write", remedy="run as root"),
    NamespaceNotFoundError("nguid 1", ["a namespace: it is another one"]),
    AmbiguousNamespaceError("nguid 1", ["one", "another"]),
    explain("nvme connect", 1, "Connection refused"),
    explain("nvme connect", 1, "something new"),
]


@pytest.mark.parametrize("error", WITH_REMEDY, ids=lambda error: type(error).__name__)
def test_the_remedy_is_an_attribute_and_ends_the_text(error: FX100Error) -> None:
    assert error.remedy
    assert error.remedy not in error.what
    assert str(error) == f"{error.what}\n  do: {error.remedy}"


def test_an_error_without_a_remedy_is_its_text() -> None:
    error = VolumeError("it broke")
    assert (error.remedy, error.what, str(error)) == (None, "it broke", "it broke")


def test_an_error_with_its_remedy_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(VolumeError("it broke", remedy="mend it")))
    assert str(error) == "it broke\n  do: mend it"
