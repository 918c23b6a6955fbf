"""Benchmarks: one command for each question, `python -m benchmarks.NAME --help`."""
