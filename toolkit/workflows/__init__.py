"""What each command does: the layer between the command line and the packages that know nothing
about commands.

    pair -> quantize/{target,draft} -> compile/{target,draft} -> [tune] -> package -> validate

Each command has a file here, and each stage has a file in `stages/`. Only these files combine the
working packages. Stage functions are imported when they are called, and keys are made of versions
that can be read without importing a heavy library, so that a build with nothing to do takes about a
second.
"""
