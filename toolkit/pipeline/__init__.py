"""Run stages in order and reuse finished ones: keys, the store, the loop."""
