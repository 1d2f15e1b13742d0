"""Programs behind `generate` and `serve`: an engine with a paged cache, a server over it, a client that stamps.

They stand here and not in a room of their own because they are made of what workloads are made of (a model's
module with a system's parts), and nothing but workloads runs them.
"""
