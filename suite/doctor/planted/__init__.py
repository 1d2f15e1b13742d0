"""Kernels with known faults, which `kernelmark doctor` runs through the real harness to see it catch them.

A root of its own for the catalog: nothing here is ever listed or measured otherwise.
"""
