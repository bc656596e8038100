"""AReaL's RPC worker on loopback only. (Separate module: run with ``python -m``.)"""

from __future__ import annotations

import sys


def main() -> None:
    from areal.infra.rpc import rpc_server

    from areal_dta.areal_fixes.loopback import LOOPBACK, use_loopback

    use_loopback()
    sys.argv[1:1] = ["--host", LOOPBACK]
    rpc_server.main()


if __name__ == "__main__":
    main()
