"""The command line: topology, plan, hosts, supervision, bench. Imports neither torch nor
runtime."""

__version__ = "0.1.0"
