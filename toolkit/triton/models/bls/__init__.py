"""The Python model of `bls`, as it is copied into a repository."""
