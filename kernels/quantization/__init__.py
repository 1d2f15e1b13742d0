"""Quantization and compression."""
