"""Engine backends: a quantized checkpoint in, an engine directory out, and back into something
that steps.
"""
