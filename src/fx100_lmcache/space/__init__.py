"""Which blocks are free, and the books of the others. Pure."""
