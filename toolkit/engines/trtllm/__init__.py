"""What the two kinds of engine for TensorRT-LLM are made of; `engines/trt_engine.py` and
`engines/trtllm_pytorch.py` use it.
"""
