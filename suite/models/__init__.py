"""One file an architecture: published configurations by name, and a module whose parts are operators.

A file here defines `MODEL` and imports torch only inside functions: listing imports them all.
"""
