"""What the adapter of LMCache's server (multiprocess mode) is made of."""
