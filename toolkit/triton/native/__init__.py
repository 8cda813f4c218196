"""Our own backend for Triton, in C++, and the Python process in which it runs a model."""
