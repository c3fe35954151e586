"""What is done with finished bundles: combine, compare, describe, publish."""
