"""From a result's JSON: tables, plots, one page of HTML, `docs/results.md`."""
