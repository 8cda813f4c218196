"""The Python models that a repository ships. They run inside tritonserver, and are entry points
there, as the CLI is elsewhere.
"""
