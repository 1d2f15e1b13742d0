"""Text to train on without a data set: rebuilt from pinned packages, the same bytes on every machine.

The repository holds a manifest and a notice, never the text.
"""
