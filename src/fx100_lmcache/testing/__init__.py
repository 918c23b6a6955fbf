"""Shipped test tools: a memory member with faults, a simulated clock, an oracle.

Everything here is deterministic: faults come from a seed, time moves only when told to. Use
them to test a backend of your own against the same promises.
"""
