"""Products of 8-bit integers on tensor cores: PTX of a block, and what the interpreter computes instead."""
