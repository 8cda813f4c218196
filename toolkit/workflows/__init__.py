"""What each command does: the floor between the command line and the packages that know nothing of
commands.

    pair -> quantize/{target,draft} -> compile/{target,draft} -> [tune] -> package -> validate

A verb has its file here, a stage its file in `stages/`; working packages meet nowhere else. Stage
functions are imported when they are called, and keys are made of versions that can be read without
importing a heavy library, so that a build that finds nothing to do takes about a second.
"""
