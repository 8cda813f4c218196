"""From engines to a served deployment: the Triton model repository, the Python model in it, and
the server process.
"""
