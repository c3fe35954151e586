"""Many settings measured: thresholds, combinations, Pareto fronts."""
