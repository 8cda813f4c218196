"""vLLM: an engine of others, which runs in a Python environment of its own."""
