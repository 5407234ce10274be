"""Who runs, who waits, who is parked: pure decisions over one view of the engine."""
