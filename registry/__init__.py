"""Results: the record of a measurement, the journal that holds it, and what is decided from it.

Nothing here knows how a measurement was made.
"""
