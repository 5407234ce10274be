"""What a person runs on one machine: the engine's environment, the embedded model, `tokenflow up`, `doctor`.

Nothing here needs the gateway's web stack: only the standard library, click and `tokenflow_engine`.
"""
