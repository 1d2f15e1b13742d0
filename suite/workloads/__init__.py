"""One file a workload: axes, options, metrics, cost, plans, and how a system is checked and measured.

A file here defines `WORKLOAD` and imports torch only inside functions: listing imports them all.
"""
