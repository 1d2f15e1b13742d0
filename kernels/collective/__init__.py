"""Collectives among the GPUs of one host: peer pointers, flags and copy engines; no multicast."""
