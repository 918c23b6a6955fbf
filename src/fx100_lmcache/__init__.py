"""KV-cache storage for LMCache on NVMe-over-Fabrics arrays."""

__version__ = "0.1.0"
