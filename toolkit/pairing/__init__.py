"""Do draft and target belong together? Proved from their tokenizers and configs, not assumed."""
