"""The Python model of `postprocessing`, as it is copied into a repository."""
