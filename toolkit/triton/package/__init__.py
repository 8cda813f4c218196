"""Writes model repositories for `tritonserver`, and the files that launch them elsewhere."""
