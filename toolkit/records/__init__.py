"""The records that stages hand on: values and paths, without behaviour. They are the contract
between stages. There is one file per writer.

Every record is frozen, is written as JSON beside what it describes, and is equal when it is read
back. `path` always points at the folder that holds the content; it is not part of any digest.
Digests are "sha256:<hex>" over content.
"""
