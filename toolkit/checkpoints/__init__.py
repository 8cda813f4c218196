"""Read and write Hugging Face checkpoints, quantized or not. Nothing in their files is trusted
before it has been checked.
"""
