"""Causal convolutions of state-space models."""
