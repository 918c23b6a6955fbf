"""Moves pieces between members and buffers: threads, deadlines, checksums, member health."""

from fx100_lmcache.engine.jobs import Engine, IoBuffer, Job, Status, Transfer

__all__ = ["Engine", "IoBuffer", "Job", "Status", "Transfer"]
