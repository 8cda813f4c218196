"""The embedded engine: the toolkit's own fused model. It runs eagerly in torch, or compiled with
AOTInductor and a small kernel library.
"""
