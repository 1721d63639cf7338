"""The delta kernel family: ``S <- exp(log_decay) S``, then ``S <- S + phi(k) beta (v - S^T phi(k))^T``."""
