"""What a run shows: progress, tables, plots."""
