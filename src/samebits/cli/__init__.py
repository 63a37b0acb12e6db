"""The commands. Nothing heavy is imported before a command needs it, so that `samebits --help` is instant."""
