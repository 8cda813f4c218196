"""The tensors of requests and responses: what they mean, and how they are read and made."""
