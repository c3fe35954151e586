"""Build recipes, their lock file and gates."""
