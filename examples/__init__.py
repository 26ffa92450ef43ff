"""Applications that use oncely, to read and to run."""
