"""Runs servers as processes of their own, and leaves nothing of them behind."""
