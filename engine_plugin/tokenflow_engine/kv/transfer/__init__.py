"""Copies of KV rows between the device's pool and host memory. The only part of `kv` that imports torch."""
