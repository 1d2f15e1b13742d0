"""A static site of results over time: one folder that opens from a disk and from any web server."""
