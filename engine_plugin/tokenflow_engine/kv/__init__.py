"""KV between device and host: what is where, and the copies between them. Knows no policy and no engine."""
