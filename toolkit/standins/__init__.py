"""Make small stand-ins for checkpoints, so that a deployment can be tried on a machine that its
models do not fit on.
"""
