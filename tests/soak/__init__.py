"""A long run of mixed and hostile traffic against a real server, which dies once in the middle:
`make soak`.

`traffic` makes requests and judges their answers, `watch` samples what the server's processes hold,
and `python -m tests.soak` puts them together and prints the checks. `growth` looks for leaks of
single kinds of requests, and `kills` at what clients see of processes that die.
"""
