"""The Python model of `llmapi`, as it is copied into a repository."""
