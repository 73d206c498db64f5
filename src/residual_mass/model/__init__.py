"""Language models: loading, the attention hook, a backbone's phi maps, `partial_kv` and the shared-prefill engine."""
