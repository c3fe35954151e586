"""Products of 8-bit integers: PTX of a block, and what the interpreter computes instead."""
