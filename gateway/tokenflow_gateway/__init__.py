"""TokenFlow's gateway: an OpenAI-compatible proxy that knows who is reading each stream."""
