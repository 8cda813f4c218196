"""Stand-ins for checkpoints that are not at hand, so that a deployment can be tried where its
models do not fit.
"""
