"""Normalization of rows."""
