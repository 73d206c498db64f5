"""Costs of decoding: latency, memory and bytes of the paper's prototype and of the fused path."""
