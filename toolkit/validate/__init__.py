"""The served deployment is measured and judged: parity, latency, quality, gates, verdict."""
