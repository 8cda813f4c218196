"""The records that stages hand on: values and paths, no behaviour. Together they are the contract;
a file per writer.

Every record is frozen, is written as JSON beside what it describes, and is read back equal. `path`
always points at the folder that holds the content; it is not part of any digest. Digests are
"sha256:<hex>" over content.
"""
