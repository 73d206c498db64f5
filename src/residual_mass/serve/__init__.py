"""The sub-command `serve`: a method behind transformers' own server, which speaks OpenAI's protocol."""
