"""What this machine has, whether it computes right, and how fast.

`python -m areal_dta.doctor` needs torch and transformers. AReaL is looked at by its
version alone, so the doctor works before AReaL is installed, and where it cannot be.
"""
