"""The speculative runtime: a draft proposes tokens, the target verifies them, and all running
requests share both models.
"""
