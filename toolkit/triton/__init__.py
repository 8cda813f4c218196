"""From engines to a served deployment: the Triton model repository, the Python models in it, and
the server process.
"""
