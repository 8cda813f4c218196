"""One file per stage: what its key is made of, and the call of the package that does the work."""
