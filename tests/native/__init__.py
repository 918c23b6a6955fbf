"""Tests of the C extension: bounds, lifetimes, memory, sanitizers."""
