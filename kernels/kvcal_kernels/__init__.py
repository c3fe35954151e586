"""Pure tensor functions, a folder per family: `reference.py` is slow and obvious, `triton.py` beside it fast.

Nothing is imported here: `import kvcal_kernels` costs neither torch nor triton.
"""
