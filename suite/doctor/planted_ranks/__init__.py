"""Faults of ranks, which `kernelmark doctor --gpus N` runs through the real harness: a root of its own."""
