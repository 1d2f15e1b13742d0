"""What results say: rows, ceilings, statistics, history over commits."""
