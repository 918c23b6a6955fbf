"""The adapters that LMCache loads. Each translates LMCache's rules into calls of the store."""
