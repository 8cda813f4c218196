"""One file per stage: the parts of its key, and the call of the package that does the work."""
