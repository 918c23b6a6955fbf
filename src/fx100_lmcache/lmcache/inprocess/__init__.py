"""What the plugin inside the vLLM workers (in-process mode) is made of."""
