"""The Python models that a repository ships. They run inside tritonserver, where they are an
entry point like the CLI.
"""
