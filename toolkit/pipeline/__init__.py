"""Content-addressed stages: keys, the store, the loop."""
