"""A plug-in that makes stock vLLM keep its KV cache as a kvcal bundle says.

vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvcal": "x.kvcal.safetensors"}'

vLLM finds `plugin.register` by the entry point `vllm.general_plugins`. Nothing here imports vllm before that.
"""
