"""The embedded engine: our own fused model, eager in torch or compiled with AOTInductor over a
small kernel library.
"""
