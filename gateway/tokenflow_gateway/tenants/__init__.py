"""Who may do what: keys, tenants, classes of service, and the record of what was used."""
