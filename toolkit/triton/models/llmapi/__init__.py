"""The `llmapi` layout: one model that takes text and gives text."""
