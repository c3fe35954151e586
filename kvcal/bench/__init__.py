"""Benchmarks: device profiles, roofline projections, kernel and generation measurements."""
