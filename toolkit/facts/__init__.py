"""Tables of facts, each with its source and confidence. They have no logic: `toolkit.plan` draws
the conclusions.
"""
