"""One file an operator: axes, input builder, reference, bytes and operations, tolerances, cases.

A file here defines `OPERATOR` and imports torch only inside functions: listing imports them all.
"""
