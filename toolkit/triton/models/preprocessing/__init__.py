"""The Python model of `preprocessing`, as it is copied into a repository."""
