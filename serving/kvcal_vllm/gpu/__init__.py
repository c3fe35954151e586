"""The plug-in on a CUDA GPU: kvcal's kernels store tokens into vLLM's pages and read them there."""
