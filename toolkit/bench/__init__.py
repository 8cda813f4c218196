"""The meter: requests to any endpoint, their times, and the limits that a user states. It judges
no correctness.
"""
