"""`make bench-gateway`: what the gateway costs beside nginx and other gateways, in one run."""
