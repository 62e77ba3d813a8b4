"""gradprune for megatron-core: the only code here that imports it, and only when asked to."""
