"""Reading Hugging Face checkpoints without trusting them: config -> ModelShape, shards ->
tensors, quantized or not.
"""
