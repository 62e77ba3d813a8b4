"""Policy losses of released trainers, what a zero advantage really does to each, and what the prover says of each."""
