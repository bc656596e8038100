"""The agent proxy on loopback: ``python -m areal_dta.processes.loopback_proxy``."""

from areal_dta.areal_fixes.agent_proxy import main

if __name__ == "__main__":
    main(loopback=True)
