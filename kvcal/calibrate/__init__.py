"""Fit a method layer by layer and write its bundle; warn where text or scheme will not do."""
