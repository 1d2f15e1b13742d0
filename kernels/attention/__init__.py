"""Attention: prefill, training, decoding, sparse, packed."""
