"""The harness tests itself: planted faults, each of which must be caught."""
