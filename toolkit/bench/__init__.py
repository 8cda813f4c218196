"""The meter: it sends requests to any endpoint, times them, and judges the limits that a user
states. It does not judge whether the texts are correct.
"""
