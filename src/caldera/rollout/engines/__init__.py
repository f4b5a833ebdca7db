"""vLLM and SGLang as samplers, in this process or in another Python's."""
