"""Activations, gated ones, and softmax."""
