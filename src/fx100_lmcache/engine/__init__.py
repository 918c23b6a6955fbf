"""Moves pieces between members and buffers: threads, deadlines, checksums, member health."""

from fx100_lmcache.engine.jobs import Engine, Job, Status, Transfer

__all__ = ["Engine", "Job", "Status", "Transfer"]
