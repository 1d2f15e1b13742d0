"""Two commits: measured in turns, found, bisected, attributed."""
