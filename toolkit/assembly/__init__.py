"""The pipeline itself: which stages there are, what each one's key is made of, and where results are published.

    pair -> quantize/{target,draft} -> compile/{target,draft} -> [tune] -> package -> validate

This is one of the two places where the working packages meet (`inprocess` is the other). Stage functions are imported when they
are called, and keys are made of versions that can be read without importing a heavy library, so that a build that finds nothing
to do takes about a second.
"""
