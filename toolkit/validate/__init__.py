"""Measure and judge the served deployment: parity, latency, quality, gates, verdict."""
