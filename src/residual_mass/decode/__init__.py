"""Decode steps: backends that own keys and values, the loops that call them, and decoding under several arms."""
