"""What a model takes and how fast it runs under each scheme, by arithmetic alone: no weights, no torch."""
