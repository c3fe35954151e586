"""What compression costs in quality, measured through the cache."""
