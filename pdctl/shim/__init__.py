"""The host's side of pdctl: starts, supervises, stops. Standard library only, python >= 3.8.

`pdctl.agent` copies these files to a host and speaks JSON with them over stdin and stdout (`main`).
They import nothing of pdctl. A service's parent is `supervise`, which outlives pdctl, records the
exit and reaps every descendant. Processes are known by pid, start ticks and boot id, or by the
PDCTL_SERVICE variable in their environment; never by name.

A host may run very many: what few calls need is imported where it is needed, and `typing`, among
the slowest of all modules, only by a type checker.
"""
