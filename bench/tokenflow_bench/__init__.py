"""Measurements of the whole system, from outside: processes, HTTP, and readers whose position is known."""
