"""Pinned images and the launcher that measures in them. Nothing here measures; a container does."""
