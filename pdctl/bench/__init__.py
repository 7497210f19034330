"""The serving benchmark: datasets, load, metrics, report. Knows HTTP and files, not hosts."""
