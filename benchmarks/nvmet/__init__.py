"""Benchmarks over a real NVMe-oF target: run them behind `tests/nvmet/run`."""
