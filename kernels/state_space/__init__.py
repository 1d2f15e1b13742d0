"""State-space models and linear attention."""
