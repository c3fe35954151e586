"""A model run layer by layer: q, k and v of each layer, and where hidden states lie meanwhile."""
