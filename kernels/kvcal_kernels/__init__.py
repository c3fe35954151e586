"""Pure tensor functions, one folder for each family: `reference.py` is slow and obvious, `triton.py` is fast.

Nothing is imported here: `import kvcal_kernels` costs neither torch nor triton.
"""
