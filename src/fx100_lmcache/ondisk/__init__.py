"""The on-disk format: label, claim and inode. Pure bytes; see docs/on-disk-format.md."""
