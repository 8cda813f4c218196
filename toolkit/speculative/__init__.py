"""The speculative runtime: a draft proposes, the target verifies, and requests share both in
flight.
"""
