"""Train tool-using agents on tau2-bench, where prefix sharing pays most."""
