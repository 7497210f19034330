"""`python -m runtime router|worker|core|rank`: one process of a deployment, from one config file.

Owns the command line and the one-line answer to a start that cannot work. Each process imports only
its own part.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from runtime.errors import RuntimeFailure


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runtime")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("router", "worker", "core", "rank"):
        sub = kinds.add_parser(kind)
        sub.add_argument("--config", type=Path, required=True, metavar="FILE")
        if kind == "core":
            sub.add_argument("--fd", type=int, required=True, help="inherited socket to the front")
        if kind == "rank":
            sub.add_argument("--rank", type=int, required=True)
            sub.add_argument("--fd", type=int, required=True, help="inherited socket to rank 0")
            sub.add_argument("--meeting", type=int, required=True, help="inherited memory file")
            sub.add_argument("--pool", type=int, required=True, help="inherited memory file")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> int:
    if args.kind == "router":
        from runtime.router.app import run_router

        return run_router(args.config)
    if args.kind == "worker":
        from runtime.front.server import run_worker

        return run_worker(args.config)
    from runtime.native import require

    require()
    if args.kind == "rank":
        from runtime.engine.follower import Inherited, run_follower

        return run_follower(args.config, args.rank, Inherited(args.fd, args.meeting, args.pool))
    from runtime.engine.process import run_core

    return run_core(args.config, args.fd)


def main(argv: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except RuntimeFailure as e:
        who = f"rank {args.rank}" if args.kind == "rank" else args.kind
        print(f"{who}: {e.line}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as e:
        if (e.name or "runtime").partition(".")[0] == "runtime":
            raise  # our own fault, not a package that is not installed
        print(
            f"{args.kind}: the Python package {e.name} is missing in {sys.executable}"
            " (install what serves: pip install 'pdctl[runtime]')",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
