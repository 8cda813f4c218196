"""The Python model of `engine`, as it is copied into a repository."""
