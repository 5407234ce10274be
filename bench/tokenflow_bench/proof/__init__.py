"""`make proof`: what README and docs claim of the real engine, measured again on this machine."""
