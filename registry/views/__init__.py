"""What a person reads: terminal tables, runs side by side, the HTML report."""
