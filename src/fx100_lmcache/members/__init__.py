"""Stripe members: a file or a block device, as an array of bytes with aligned access."""

from fx100_lmcache.members.base import Member
from fx100_lmcache.members.device import DeviceMember, open_member

__all__ = ["DeviceMember", "Member", "open_member"]
