"""`tensorrt_llm.llmapi`. It does not export DecodingBaseConfig, which has `from_dict`."""
