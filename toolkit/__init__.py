"""Quantize, compile, package, serve and judge an LLM with draft-target speculative decoding."""

__version__ = "0.1.0"
