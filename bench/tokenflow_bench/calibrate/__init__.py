"""`tokenflow calibrate`: what passes cost on an engine, from the times at which its tokens come."""
