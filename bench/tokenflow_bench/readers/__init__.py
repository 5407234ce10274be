"""What the gateway knows of its readers, and what a thousand of them cost. `make bench-readers`."""
