"""Tables of facts, each with its source and how sure it is. No logic: what follows from them
stands in `toolkit.plan`.
"""
