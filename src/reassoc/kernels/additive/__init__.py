"""The additive kernel family: ``S <- exp(log_decay) S + phi(k) v^T`` (sum is decay zero)."""
