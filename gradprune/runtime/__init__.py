"""A microbatch of a wrapped step while it runs: observed and proved, or dead; and what looks after it."""
