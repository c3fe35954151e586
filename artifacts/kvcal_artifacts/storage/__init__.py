"""Which token of which row lies where, and the packed blocks themselves."""
