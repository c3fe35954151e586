"""Pure tensor functions, one folder per family: `reference.py` is the slow and obvious one, `triton.py` the fast one.

Nothing is imported here: `import kvcal_kernels` costs neither torch nor triton.
"""
