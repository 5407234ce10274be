"""What outlives the process: SQLite files in one private directory; see docs/tenants.md."""
