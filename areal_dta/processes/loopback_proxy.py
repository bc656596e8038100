"""The agent proxy on loopback. (Separate module: run with ``python -m``.)"""

from areal_dta.areal_fixes.agent_proxy import main

if __name__ == "__main__":
    main(loopback=True)
