"""Prove from tokenizers and configs that draft and target belong together."""
