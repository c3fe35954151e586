"""How a layer gets from packed blocks to attention: by which kernel, and by what else where none runs."""
