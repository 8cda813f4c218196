"""Quantize a checkpoint: calibrate it, measure its quality, write it, and read it back."""
