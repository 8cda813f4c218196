"""Starts a `tritonserver` process on this machine, watches it, and cleans up after it."""
