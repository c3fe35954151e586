"""Products of 8-bit integers with packed codes: assembly that the attention kernel takes in. Only on a GPU: nothing here has a
reference of its own, attention's is compared with it.
"""
