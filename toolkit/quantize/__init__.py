"""A source checkpoint and calibration text in, a quantized checkpoint that was measured, checked
and read back out.
"""
