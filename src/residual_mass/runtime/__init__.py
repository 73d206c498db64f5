"""What decoding costs: latency, memory and bytes, of the paper's prototype and of the fused path."""
