"""One file a trainer, the only code of gradprune that imports it."""
