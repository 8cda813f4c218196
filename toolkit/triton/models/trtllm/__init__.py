"""The Python model of `llmapi` over TensorRT-LLM, as it is copied into a repository."""
